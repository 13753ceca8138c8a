"""A command that nobody waits for any more ends by itself, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onekernel.cli.lifetime import is_detached, watch_parent
from tests.tiny_llama import write_tiny

PARENT = """
import pathlib, subprocess, sys, time
answer = pathlib.Path(sys.argv[1])
child = subprocess.Popen(sys.argv[2:], stdout=answer.open("wb"))
while answer.stat().st_size < 40:
    time.sleep(0.05)
print(child.pid, flush=True)
time.sleep(600)
"""
"""The answer goes to a file: no broken pipe ends the child."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command whose answer has no end in sight."""
    folder = write_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=1, max_position_embeddings=200_000)
    flags = ["--load-format", "dummy", "-p", "1 2 3", "-c", "0", "--ignore-eos", "--device", "cpu", "-t", "1"]
    return [sys.executable, "-m", "onekernel", "generate", str(folder), *flags]


@pytest.fixture(scope="module")
def running(endless: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two commands in the middle of an answer and one whose parent can be killed; all at once, to save time."""
    answer = str(tmp_path_factory.mktemp("answer") / "text")
    commands = {"SIGTERM": endless, "SIGINT": endless, "parent": [sys.executable, "-c", PARENT, answer, *endless]}
    processes = {
        name: subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


def gone(pid: int, seconds: float = 120.0) -> bool:
    """Whether a process that is not our child ends in time (a zombie has ended)."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_the_middle_of_an_answer_ends_the_command_in_order(
    running: dict[str, subprocess.Popen[str]], name: str, code: int
) -> None:
    """The code of SIGTERM is not that of a process that was killed, which is negative."""
    process = running[name]
    assert process.stdout is not None
    assert process.stdout.read(40)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "Traceback" not in errors


def test_a_command_ends_with_its_parent(running: dict[str, subprocess.Popen[str]]) -> None:
    process = running["parent"]
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    assert gone(child)
    assert process.stderr is not None
    assert f"process {process.pid}, which started this one, has ended" in process.stderr.read()


@pytest.mark.timeout(30)
@pytest.mark.complaint("K4", file="cli/lifetime.py", old="    while parent() == first:", new="    while True:")
def test_a_parent_s_death_is_noticed_and_an_end_that_takes_too_long_is_cut_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parents, codes = iter([7, 7, 1]), list[int]()
    before = signal.signal(signal.SIGTERM, lambda *args: None)
    try:
        watch_parent(lambda: next(parents), codes.append, grace_s=0.01)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert codes == [143]
    assert "process 7, which started this one, has ended" in caplog.text and "nohup or setsid" in caplog.text


def test_what_was_detached_on_purpose_has_no_parent_to_die_with() -> None:
    script = "from onekernel.cli.lifetime import is_detached; print(is_detached())"

    def answer(**options: bool) -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, **options)
        return done.stdout.strip()

    assert answer(start_new_session=True) == "True"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert answer() == "True"  # what nohup does
    finally:
        signal.signal(signal.SIGHUP, before)
    assert is_detached() == (os.getsid(0) == os.getpid() or before is signal.SIG_IGN)


def test_calling_main_from_python_changes_no_handler(capsys: pytest.CaptureFixture[str]) -> None:
    from onekernel.cli.main import main

    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    with pytest.raises(SystemExit):
        main(["--version"])
    assert signal.getsignal(signal.SIGTERM) is before and threading.active_count() == threads
