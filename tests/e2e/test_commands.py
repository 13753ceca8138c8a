"""The commands with a real model, SmolLM2-135M-Instruct, and few tokens. One in a process of its own, as users do."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onekernel.cli.main import main

QUESTION = "What is the capital of France?"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def onekernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in this process; return exit code, stdout and stderr."""

    def run(*arguments: str | Path, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_generate_says_paris_and_its_timings(smollm2_gguf: Path) -> None:
    flags = ["-p", QUESTION, "--temp", "0", "-n", "16"]
    command = [sys.executable, "-m", "onekernel", "generate", smollm2_gguf, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert [part.split()[0] for part in last.split(" | ")] == ["load", "prompt", "TTFT", "decode", "seed"]
    assert "context 8192 of 8192 tokens" in done.stderr  # and what it takes, before anything is allocated
    assert "KV cache 189 MB" in done.stderr


def test_json_from_standard_input(smollm2_gguf: Path, onekernel: Command) -> None:
    flags = ["--temp", "0", "-n", "8", "--json", "--logprobs", "2", "-c", "512"]
    code, out, err = onekernel("generate", "-m", smollm2_gguf, *flags, stdin=QUESTION + "\n")
    assert code == 0, err
    found = json.loads(out)
    assert "Paris" in found["text"]
    assert found["usage"]["completion_tokens"] == found["timings"]["predicted_n"] <= 8
    assert found["timings"]["prompt_n"] == found["usage"]["prompt_tokens"] - 1
    assert len(found["logprobs"]) == len(found["token_ids"])
    for entry in found["logprobs"]:
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])  # greedy takes the likeliest
        assert bytes(entry["bytes"]).decode() == entry["token"]


@pytest.mark.complaint("I1", file="engine/engine.py", old="if len(prompt) >= context:", new="if not prompt:")
def test_a_prompt_that_is_too_long_is_refused_and_not_cut(smollm2_gguf: Path, onekernel: Command) -> None:
    code, out, err = onekernel("generate", smollm2_gguf, "-c", "64", stdin="word " * 500)
    assert (code, out) == (1, "")
    error = err.splitlines()[-1]
    assert " 64 tokens" in error
    [prompt_tokens] = [int(number) for number in re.findall(r"the prompt has (\d+) tokens", error)]
    assert 500 < prompt_tokens < 600
    assert f"--ctx-size {prompt_tokens + 1}" in error


def test_an_empty_prompt_is_refused(smollm2_gguf: Path, onekernel: Command) -> None:
    code, out, err = onekernel("generate", smollm2_gguf, stdin="")
    assert (code, out) == (2, "")
    assert err.startswith("error: the prompt is empty")


def test_perplexity_of_a_real_text(smollm2_gguf: Path, onekernel: Command, tmp_path: Path) -> None:
    """The second window is the first one's words in another order, which the model must find much less likely."""
    prose = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level. "
        "A year has twelve months, and a week has seven days. Most birds can fly, but penguins only swim."
    )
    words = prose.split()
    text = tmp_path / "prose.txt"
    text.write_text(f"{prose} {' '.join(words[::2] + words[1::2])} {prose}")
    code, out, err = onekernel("perplexity", smollm2_gguf, "-f", text, "-c", "48", "--chunks", "2", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["windows"], found["n_ctx"], found["tokens_scored"]) == (2, 48, 2 * 23)
    first, both = (float(value) for value in re.findall(r"\[\d\]([\d.]+),", err))
    assert 1 < first < 50
    assert both > 2 * first
    assert found["ppl"] == pytest.approx(both, abs=1e-3)


def test_info_of_a_real_file(smollm2_gguf: Path, onekernel: Command) -> None:
    code, out, err = onekernel("info", smollm2_gguf, "--json", "--device", "cpu")
    assert code == 0, err
    found = json.loads(out)
    assert found["parameters"] == 134_515_008
    assert found["stored_types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert (found["context_limit"], found["eos_token_ids"], found["chat_template"]) == (8192, [2], True)


def test_chat_remembers_and_forgets(smollm2_gguf: Path, onekernel: Command) -> None:
    lines = f"{QUESTION}\n/undo\n{QUESTION}\n"
    code, out, err = onekernel("chat", smollm2_gguf, "--temp", "0", "-n", "12", "-c", "512", stdin=lines)
    assert code == 0, err
    answers = out.splitlines()
    assert "Paris" in answers[0]
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :]  # /undo left no trace
