"""Ternary models against transformers, which reads the same files: packed, and master weights quantised at each use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.cli.main import main
from tests import ternary_models as models
from tests.ternary_models import BITNET
from tests.unit.models.test_ternary import load, logits, write

pytestmark = pytest.mark.xdist_group("transformers")

ANSWER = 60
"""With its prompt 64 tokens."""


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """Their quantisers are compiled, which takes a minute and a C++ compiler and changes nothing."""
    import torch._dynamo

    before = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    yield
    torch._dynamo.config.disable = before


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("multiply", "AutoBitLinear"),
        pytest.param("divide", "BitLinear", marks=pytest.mark.slow),
        pytest.param("bf16 masters", "AutoBitLinear", marks=pytest.mark.slow),
    ],
)
def test_logits_agree_on_a_greedy_answer(kind: str, layer: str, tmp_path: Path) -> None:
    """One value on the other side of a half moves logits by a hundredth, so that tokens may differ, but seldom."""
    source, numbers = write(tmp_path, kind)
    reference = theirs(source)
    assert type(reference.model.layers[0].mlp.down_proj).__name__ == layer
    with torch.inference_mode():
        answer = reference.generate(
            torch.tensor([[5, 6, 7, 8]]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
        want = reference(answer).logits[0].float()
    tokens = answer[0].tolist()
    got = logits(load(source), tokens, (len(tokens),))
    assert (got - want).norm() < 5e-2 * want.norm()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8
    assert len(set(tokens)) > 16
    assert numbers.config["vocab_size"] == got.shape[1]


def test_their_packing_is_the_one_that_tests_write() -> None:
    from transformers.integrations.bitnet import pack_weights

    codes = models.make(BITNET).codes["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(pack_weights(torch.from_numpy(codes).clone()), models.hf_pack(codes))


def test_a_converted_model_is_theirs_too(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source, _ = write(tmp_path / "source", "divide")
    assert main(["convert", str(source), str(tmp_path / "made"), "--ternary"]) == 0
    tokens = list(range(30, 50))
    with torch.inference_mode():
        before, after = (theirs(folder)(torch.tensor([tokens])).logits[0] for folder in (source, tmp_path / "made"))
    assert (before - after).norm() < 3e-2 * before.norm()
