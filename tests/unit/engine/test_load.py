"""What loading tells its listener, and when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onekernel import LLM
from onekernel.cli.main import main
from onekernel.engine.load import Listener
from tests.tiny_llama import write_tiny


def test_memory_is_told_before_anything_is_read_and_of_each_step_its_time(tmp_path: Path) -> None:
    told: list[str] = []
    listener = Listener(told.append, told.append, lambda what, done, total: told.append(f"{what} {done}/{total}"))
    options = {"device": "cpu", "load_format": "dummy", "max_context": 128}
    with LLM(str(write_tiny(tmp_path)), listener=listener, **options) as llm:  # type: ignore[arg-type]
        steps = llm.loaded.steps_s
    read = [index for index, text in enumerate(told) if text.startswith("loading tensors")]
    memory = [index for index, text in enumerate(told) if ", KV cache " in text and ", workspace " in text]
    assert len(memory) == 1 and memory[0] < read[0]
    _, done, total = re.split("[ /]", told[read[-1]])[1:]
    assert done == total and len(read) > 10
    times = [text.partition(":")[0] for text in told if re.fullmatch(r"[a-z]+: \d+\.\d\d s", text)]
    assert times == list(steps) == ["open", "tokenizer", "weights", "backend"]
    assert llm.loaded.load_s == sum(steps.values()) > 0


def test_with_v_the_command_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "-c", "64", "-p", "1 2 3", "-n", "2"]
    assert main(["generate", str(write_tiny(tmp_path)), *flags, "-v"]) == 0
    err = capsys.readouterr().err
    assert all(re.search(rf"^{step}: \d+\.\d\d s$", err, re.M) for step in ("open", "tokenizer", "weights", "backend"))
    assert main(["generate", str(tmp_path), *flags]) == 0
    assert not re.search(r"^weights: ", capsys.readouterr().err, re.M)
