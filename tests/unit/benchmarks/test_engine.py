"""The engine's benchmark runs on a CPU with a tiny model, and its rows are what the issue asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_llama import write_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    folder.mkdir()
    write_tiny(folder, intermediate_size=64, num_hidden_layers=1, vocab_size=200, max_position_embeddings=1024)
    flags = ["--device", "cpu", "--prompt", "8", "--new", "12", "--repeats", "2", "--turns", "20", "--commit", "abc"]
    flags += ["--stops", "3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "engine.py"), "--model", str(folder / "config.json"), *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    out = folder / "engine.json"
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False, env=env, timeout=250
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(out.read_text())
    return result


def test_every_kind_has_a_row_with_both_sides(written: dict[str, object]) -> None:
    rows = written["rows"]
    assert isinstance(rows, list)
    kinds = [row["kind"] for row in rows]
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) >= {
        *("streaming and stop", "greedy", "temperature", "top-k 40", "top-p 0.9", "min-p 0.05", "penalties"),
        *("logprobs 20", "constraint", "clients 1", "clients 2", "clients 4", "cancel", "chat of 20 turns"),
        *("top-p 0.9, flat", "logit bias", "stop string"),
    }
    for row in rows:
        assert row["us_per_token"]["median"] > 0 and row["greedy_us_per_token"]["median"] > 0
        assert row["p99_us"] > 0
        assert 0 < row["gpu_mb_start"] <= row["gpu_mb_end"] < row["gpu_mb_start"] + 200
        assert (row["model"], row["backend"]) == ("tiny", "reference")
    assert written["commit"] == "abc" and written["device"] == "CPU"


def test_logits_are_sharp_where_they_should_be_and_a_cancel_is_quick(written: dict[str, object]) -> None:
    rows = {row["kind"]: row for row in written["rows"]}  # type: ignore[attr-defined]
    assert 0.3 <= rows["temperature"]["top_probability"] <= 0.7
    assert rows["temperature, flat"]["top_probability"] < 0.3
    assert rows["cancel"]["tokens_after"] <= 12 - 3
    assert rows["cancel"]["cancel_ms"]["median"] > 0
    stop = rows["stop string"]
    assert 2 <= stop["answer_tokens"] <= 12 // 2 + 2 and stop["match_to_word_ms"]["repeats"] == 3
    assert 0 < stop["match_to_word_ms"]["median"] <= stop["match_to_word_p99_ms"]
