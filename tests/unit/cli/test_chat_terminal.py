"""`chat` and `generate` on a pseudo-terminal: Ctrl-C, Ctrl-D, and a paste of many lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fakes.py")

CTRL_C, CTRL_D = "\x03", "\x04"


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, *arguments: str, prompt_toolkit: bool = True) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "NO_COLOR": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
        program = f"import runpy; runpy.run_path({str(FAKE)!r}, run_name='__main__')"
        if not prompt_toolkit:
            program = f"import sys; sys.modules['prompt_toolkit'] = None; {program}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal only on one's own terminal
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until `text` has been shown after everything that was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown in {seconds} s, but {self.shown!r}"
            if select.select([self._own], [], [], 0.1)[0]:
                self.shown += os.read(self._own, 4096).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def leave(self, key: str) -> int:
        """Press a key until the program has ended, and return its exit code.

        Once is not enough: a signal between readline's drawing of the prompt and its waiting is seen at the next key.
        """
        for _ in range(10):
            self.type(key)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):  # Linux says EIO when the other side has closed
                    if select.select([self._own], [], [], 0.1)[0]:
                        os.read(self._own, 4096)
                if (code := self.process.poll()) is not None:
                    return code
        raise AssertionError(f"it does not end at {key!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture(params=[True, False], ids=["prompt-toolkit", "input"])
def screen(request: pytest.FixtureRequest) -> Iterator[Screen]:
    screen = Screen("chat", "model", prompt_toolkit=request.param)
    yield screen
    screen.close()


@pytest.mark.complaint(
    "K7",
    file="cli/session.py",
    old="        if pressed:\n            raise KeyboardInterrupt\n",
    new="        raise KeyboardInterrupt\n",
)
def test_ctrl_c_stops_the_answer_and_keeps_it_and_a_second_one_leaves(screen: Screen, tmp_path: Path) -> None:
    screen.wait_for(">")
    screen.type("Hi\r")
    screen.wait_for("word3")
    screen.type(CTRL_C)
    screen.wait_for("[stopped: what there is of the answer is kept")
    screen.wait_for(">")
    file = tmp_path / "chat.json"
    screen.type(f"/save {file}\r")
    screen.wait_for("[saved 1 turns")
    question, answer = json.loads(file.read_text())
    assert question["content"] == "Hi"
    assert answer["content"].startswith(" word0 word1 word2 word3")
    assert not answer["content"].endswith("word99")
    screen.wait_for(">")
    assert screen.leave(CTRL_C) == 130


@pytest.mark.complaint(
    "K7",
    file="cli/line_editor.py",
    old="    return session.prompt  # type: ignore[no-any-return]\n",
    new="    return lambda: input(PROMPT)\n",
)
def test_a_paste_of_many_lines_is_one_message_and_ctrl_d_leaves(tmp_path: Path) -> None:
    screen = Screen("chat", "model")
    try:
        screen.wait_for(">")
        screen.type("\x1b[200~def f():\r    return 1\n\x1b[201~")  # terminals send a carriage return for a line break
        screen.type("what?\r")
        screen.wait_for("word0")
        screen.type(CTRL_C)
        screen.wait_for("[stopped")
        file = tmp_path / "chat.json"
        screen.type(f"/save {file}\r")
        screen.wait_for("[saved 1 turns")
        screen.wait_for(">")
        assert json.loads(file.read_text())[0]["content"] == "def f():\n    return 1\nwhat?"
        screen.type("half a thought" + CTRL_C)  # clears the line, and leaves only when that is empty
        assert screen.leave(CTRL_D) == 0
    finally:
        screen.close()


def test_ctrl_c_ends_generate_with_its_timings() -> None:
    screen = Screen("generate", "model", "-p", "Hi")
    try:
        screen.wait_for("word3")
        screen.type(CTRL_C)
        screen.wait_for("| decode")
        assert screen.process.wait(60) == 130
    finally:
        screen.close()
