"""What the server adds to each streamed token. The figures are in results/server.json; this only catches a blunder."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.server import VOCAB, WordsBackend, measure
from onekernel.engine.engine import Engine
from onekernel.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("load")]

LIMIT_US = 100
NOISE = 10
"""The limit is for a quiet machine; CI's may be ten times as slow."""


@pytest.mark.parametrize("clients", [1, 8])
def test_a_streamed_token_costs_little(clients: int) -> None:
    with closing(Engine(WordsBackend("instant", 0.0), Tokenizer.placeholder(VOCAB), {})) as engine:
        row = measure(engine, "instant", clients, prompt=16, new=1000, repeats=3)
    assert row["errors"] == 0
    assert row["overhead_us"] < LIMIT_US * NOISE * clients  # they share one interpreter
    assert row["us_per_token"]["median"] > 0
