"""Every command on a ternary model, whose weights are random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onekernel.cli.main import main
from onekernel.weights.shipped import read_shipped
from tests.ternary_models import BITNET, FIRST, LLAMA, QWEN, write_config

DUMMY = ["--load-format", "dummy", "--device", "cpu", "-t", "1"]
BENCH = ["-p", "8", "-n", "8", "-r", "1", "--no-warmup", "-o", "json", "--dtype", "bfloat16"]


def answer(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    write_config(folder, config)
    assert main(["generate", str(folder), "-p", "3 1 4 1 5", "--json", *DUMMY, *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("config", [BITNET, LLAMA, FIRST, QWEN], ids=["bitnet", "llama", "first", "qwen"])
def test_generate(config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And random weights give text that tests can use: it does not fall into a short loop."""
    found = answer(tmp_path, config, capsys, "-n", "128", "--temp", "0", "--ignore-eos")
    assert found["backend"] == "reference"
    assert len(found["token_ids"]) == 128
    assert len(set(found["token_ids"])) >= 32


def test_bf16_around_the_products_gives_the_same_answer_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("-n", "24", "--temp", "1", "--seed", "5", "--dtype", "bfloat16", "--ignore-eos")
    first, second = (answer(tmp_path, BITNET, capsys, *flags) for _ in range(2))
    assert first["dtype"] == "bfloat16"
    assert first["token_ids"] == second["token_ids"]


def test_bench_counts_the_bytes_that_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, BITNET)
    assert main(["bench", str(tmp_path), *DUMMY, *BENCH]) == 0
    prompt, decode = json.loads(capsys.readouterr().out)
    layers = 2 * (256 * (256 + 64 + 64 + 256) + 3 * 256 * 512)  # a byte a weight on a CPU
    assert layers < prompt["model_size"] < 1.1 * layers + 2 * 320 * 256
    assert decode["weights_gbps"] == pytest.approx(prompt["model_size"] * decode["avg_ts"] / 1e9, rel=0.05)


def test_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, QWEN)
    (tmp_path / "text.txt").write_text(" ".join(str(number % 300) for number in range(0, 900, 7)))
    assert main(["perplexity", str(tmp_path), "-f", str(tmp_path / "text.txt"), "-c", "32", "--json", *DUMMY]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 50 < found["ppl"] < 5000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bitnet-b1.58-2B-4T", "BitNetForCausalLM, tied embeddings, sub-norms, ternary with one scale a projection"),
        ("Ternary-Qwen3-1.7B", "ternary with a scale for 128 columns, ternary head"),
    ],
)
def test_info_says_what_is_ternary(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", name, "--device", "cpu"]) == 0
    found = capsys.readouterr().out
    assert words in found
    assert "as ternary codes and bfloat16" in found


def test_info_of_2b_4t_is_a_byte_a_weight_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "bitnet-b1.58-2B-4T", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 2_412_820_480
    assert found["memory_bytes"] == pytest.approx(2.084e9 + 656.7e6, rel=0.01)
    assert found["config"]["ternary"] == {"group": None, "head": "dense"}


def test_plan_shows_a_ternary_model_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bitnet-b1.58-2B-4T", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "tile rows      residual 16, qkv 16, gate_up 16, head 8" in shown
    assert "read per token 1.178 GB" in shown
    assert main(["plan", "Ternary-Qwen3-1.7B", "--device", "cpu"]) == 2
    assert "embedding and head are ternary" in capsys.readouterr().err
    write_config(tmp_path, BITNET)
    assert main(["generate", str(tmp_path), "-p", "1", "--backend", "megakernel", *DUMMY]) == 2
    assert "backend megakernel is not possible" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "-p", "1", "--sparse", "on", *DUMMY]) == 2
    assert "sparse is on and only the megakernel" in capsys.readouterr().err


def test_every_shipped_ternary_config_says_how_it_is_ternary() -> None:
    assert read_shipped("Ternary-Qwen3-1.7B")["quantization_config"]["group_size"] == 128
    assert "quantization_config" not in read_shipped("bitnet_b1_58-3B")
