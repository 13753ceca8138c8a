"""Processes on a real GPU: two at once, and one that ends in whatever way leaves the GPU free for the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.device.facts import facts
from onekernel.errors import DeviceError
from tests.tiny_llama import write_tiny

pytestmark = pytest.mark.timeout(180)

GPU = "cuda:0"
START_S, END_S, FREE_S = 90.0, 30.0, 10.0
SLACK_BYTES = 64 << 20
ENDLESS = ["--load-format", "dummy", "-p", "1 2 3", "-c", "0", "--ignore-eos", "--device", GPU]
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:])
time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers take minutes."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8}
    rest = {"head_dim": 64, "vocab_size": 4096, "max_position_embeddings": 400_000}
    return str(write_tiny(tmp_path_factory.mktemp("model"), **shape, **rest))


class Answering:
    """A command in the middle of an answer that has no end in sight; its text goes to a file."""

    def __init__(self, model: str, folder: Path, *before: str) -> None:
        self.text, self.errors = folder / "text", folder / "errors"
        command = [*before, sys.executable, "-m", "onekernel", "generate", model, *ENDLESS]
        with self.text.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)
        self.goes_on()

    def goes_on(self) -> None:
        """Wait for more of the answer."""
        size, give_up = self.text.stat().st_size, time.monotonic() + START_S
        while self.text.stat().st_size <= size:
            assert self.process.poll() is None and time.monotonic() < give_up, self.errors.read_text()
            time.sleep(0.05)


@pytest.fixture
def answering(model: str, tmp_path: Path) -> Iterator[Answering]:
    one = Answering(model, tmp_path)
    yield one
    one.process.kill()
    one.process.wait()


def free_bytes() -> int:
    free: int = torch.cuda.mem_get_info(GPU)[0]
    return free


def short_answer(model: str) -> list[int]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(model, load_format="dummy", device=GPU, max_context=512) as llm:
        assert llm.loaded.engine.backend.name == "megakernel"
        return list(llm.generate([1, 2, 3], params).token_ids)


def is_free_again(model: str, before: int, answer: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Demand the memory back, nobody else on the GPU, and the answer that there was before."""
    give_up = time.monotonic() + FREE_S
    while free_bytes() < before - SLACK_BYTES:
        assert time.monotonic() < give_up, f"{before - free_bytes()} bytes are still taken"
        time.sleep(0.1)
    caplog.clear()
    assert short_answer(model) == answer
    assert "will be slow" not in caplog.text


@pytest.mark.parametrize(
    ("name", "codes"),
    [("SIGTERM", {143}), ("SIGINT", {130}), ("SIGKILL", {-9}), ("SIGHUP", {-1})],
    ids=lambda v: str(v),
)
def test_a_signal_in_the_middle_of_an_answer_leaves_the_gpu_free(
    model: str, tmp_path: Path, name: str, codes: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    answer = short_answer(model)
    torch.cuda.empty_cache()
    before = free_bytes()
    process = Answering(model, tmp_path).process
    process.send_signal(getattr(signal, name))
    assert process.wait(END_S) in codes
    is_free_again(model, before, answer, caplog)


def test_the_parent_s_death_in_the_middle_of_an_answer_leaves_the_gpu_free(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = short_answer(model)
    torch.cuda.empty_cache()
    before = free_bytes()
    parent = Answering(model, tmp_path, sys.executable, "-c", PARENT).process
    parent.kill()
    parent.wait()
    is_free_again(model, before, answer, caplog)


def test_a_process_that_was_stopped_longer_than_a_token_may_take_goes_on(answering: Answering) -> None:
    """The launch ends by itself meanwhile, at its limit of tokens; nobody blames the kernel."""
    answering.process.send_signal(signal.SIGSTOP)
    time.sleep(8.0)
    answering.process.send_signal(signal.SIGCONT)
    answering.goes_on()
    answering.goes_on()
    answering.process.send_signal(signal.SIGINT)
    assert answering.process.wait(END_S) == 130, answering.errors.read_text()


def test_two_processes_are_slow_but_right_and_the_second_is_warned(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """How slow is printed: the same answer alone, and beside another process."""

    def timed() -> tuple[list[int], float]:
        params = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
        with LLM(model, load_format="dummy", device=GPU, max_context=512) as llm:
            done = llm.generate([1, 2, 3], params)
            return list(done.token_ids), done.timings.decode_ms / 255 * 1e3

    alone, alone_us = timed()
    assert "will be slow" not in caplog.text
    other = Answering(model, tmp_path)
    try:
        shared, shared_us = timed()
        assert shared == alone
        assert f"process {other.process.pid} uses {facts(GPU).uuid} too" in caplog.text
        other.goes_on()
    finally:
        other.process.kill()
        other.process.wait()
    with capsys.disabled():
        print(f"\n  {alone_us:.0f} us per token alone, {shared_us:.0f} us beside another process", end="")


def test_under_mps_a_second_process_is_refused_by_name(
    model: str, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service itself is not started: the GPU's settings are left alone."""
    monkeypatch.setattr("onekernel.engine.gpu_claim.mps_runs", lambda: True)
    with pytest.raises(DeviceError, match=rf"process {answering.process.pid} .*Multi-Process Service"):
        short_answer(model)
    answering.goes_on()
