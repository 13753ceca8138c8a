"""The command line as a whole: speed of --help, exit codes, one-line errors, what goes to stdout."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onekernel import __version__
from onekernel.cli.main import COMMANDS, main
from onekernel.errors import ConfigError, ContextLengthError, ModelError
from tests.unit.cli.fakes import FakeLLM, Script, run

HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "huggingface_hub", "prompt_toolkit", "transformers")

SHOWS_MODULES = f"""
import sys
from onekernel.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print("code", code, "heavy", [name for name in {HEAVY} if name in sys.modules])
"""

HELP = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
USAGE_ERRORS = [
    [],
    ["generat"],
    ["generate", "model", "--no-such-flag"],
    ["generate", "model", "-p", "x", "--temp", "warm"],
    ["generate", "model", "-p", "x", "--temp", "-1"],
    ["generate", "model", "-p", "x", "--ctx-size", "1"],
    ["generate", "model", "-p", ""],
    ["generate", "-p", "x"],
    ["generate", "model", "-m", "model", "-p", "x"],
    ["chat", "model", "--dtype", "int3"],
    ["bench", "model", "-p", "0", "-n", "0"],
    ["bench", "model", "-p", "512", "-d", "1000"],
    ["bench"],
    ["perplexity", "model"],
    ["perplexity", "model", "--file", "/no/such/file"],
    ["info"],
    ["train"],
    ["train", "/no/such/run.toml"],
    ["sparsify", "model", "folder"],
    ["sparsify", "model", "folder", "--text", "x", "--steps", "0"],
]


def imports_nothing_heavy(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-c", SHOWS_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"code {code} heavy []"
    assert bool(done.stderr) == (code == 2)


@pytest.mark.complaint("A5", file="cli/flags.py", old="import argparse\n", new="import argparse, torch\n")
def test_help_imports_nothing_heavy() -> None:
    imports_nothing_heavy(["--help"], 0)


@pytest.mark.complaint(
    "A5",
    file="cli/generate.py",
    old="    text = read_prompt(args)\n",
    new="    import torch; text = read_prompt(args)\n",
)
def test_a_usage_error_imports_nothing_heavy() -> None:
    imports_nothing_heavy(["generate", "model", "-p", ""], 2)


@pytest.mark.parametrize(("arguments", "code"), [*((a, 0) for a in HELP), *((a, 2) for a in USAGE_ERRORS)])
def test_no_help_and_no_usage_error_imports_anything_heavy(arguments: list[str], code: int) -> None:
    imports_nothing_heavy(arguments, code)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "--no-such-flag"]])
def test_help_and_usage_errors_take_no_time(arguments: list[str]) -> None:
    """150 ms are the limit for a quiet machine; 400 of a processor's time still tell us from a second of imports."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "onekernel", *arguments], capture_output=True, check=False)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert 0 < min(seconds() for _ in range(8)) < 0.4


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "onekernel", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"onekernel {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"    {command} " in shown for command in COMMANDS)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make `onekernel env` raise what the test says."""

    def arrange(error: BaseException) -> None:
        def fail(*_: object) -> int:
            raise error

        monkeypatch.setattr(COMMANDS["env"], "run", fail)

    yield arrange


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ModelError("model.safetensors is cut"), 1, "error: model.safetensors is cut\n"),
        (ConfigError("top_k is -1"), 2, "error: top_k is -1\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyError("x"), 1, "error: KeyError: 'x' (-v shows where)\n"),
        (
            ImportError("libtorch is broken", name="torch"),
            1,
            "error: ImportError: libtorch is broken; `onekernel env` shows what is installed (-v shows where)\n",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(
    error: BaseException, code: int, shown: str, failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error)
    assert main(["env"]) == code
    assert capsys.readouterr() == ("", shown)


def test_a_traceback_is_for_those_who_ask(failing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyError("x"))
    assert main(["env", "-v"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Traceback")
    assert err.endswith("error: KeyError: 'x'\n")


def test_the_log_has_no_traceback_either(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    def fail(*_: object) -> int:
        logging.getLogger("onekernel.engine").error("a request failed", exc_info=ValueError("x"))
        logging.getLogger("onekernel.engine").info("not shown")
        return 0

    monkeypatch.setattr(COMMANDS["env"], "run", fail)
    main(["env"])
    assert capsys.readouterr().err == "ERROR onekernel.engine: a request failed\n"
    main(["env", "-v"])
    assert "ValueError: x" in capsys.readouterr().err


def test_an_unknown_log_level_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKERNEL_LOG", "loud")
    assert main(["env"]) == 2
    assert capsys.readouterr().err == "error: ONEKERNEL_LOG is 'loud'; it must be debug, info, warning or error\n"


@pytest.mark.complaint(
    "I1", file="errors.py", old='f"the prompt has {least}{prompt_tokens} tokens and leaves', new='f"the prompt leaves'
)
def test_a_prompt_that_is_too_long_names_both_numbers_and_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([Script([ContextLengthError(150, 100, 4096)])])
    assert run(llm, ["generate", "model", "-p", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "150 tokens" in line
    assert "100 tokens" in line
    assert "--ctx-size 151" in line


def test_a_terminal_that_lacks_a_character_gets_another() -> None:
    with pytest.MonkeyPatch.context() as patch:
        out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        patch.setattr(sys, "stdout", out)
        assert run(FakeLLM([Script(("café",))]), ["generate", "model", "-p", "x"]) == 0
        out.seek(0)
        assert out.read() == "caf?\n"


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    """`onekernel generate ... | head -c 1`: the answer is cancelled, nothing is printed about it."""
    program = Path(__file__).with_name("fakes.py")
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    command = [sys.executable, str(program), "generate", "model", "-p", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        start = time.monotonic()
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert time.monotonic() - start < 5  # the whole answer would take 10 s
    assert errors.splitlines() == ["device cpu (fake)"]


def test_a_second_ctrl_c_while_the_command_ends_is_no_traceback(failing: Any) -> None:
    failing(KeyboardInterrupt())
    assert main(["env"]) == 130
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_python_still_imports_the_command_line_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onekernel.__main__ import main as entry

    class Importing(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "onekernel.cli.main", Importing("onekernel.cli.main"))
    assert entry() == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_standard_stream_that_is_closed_is_an_empty_one(closed: int) -> None:
    """As in `onekernel generate ... 2>&-`: notes must not end up between the data."""
    command = f'exec "$0" -m onekernel info SmolLM2-135M --load-format dummy --device cpu {closed}>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("" if closed == 1 else "model ")


def test_notes_for_a_closed_stderr_are_not_on_stdout() -> None:
    command = 'exec "$0" -m onekernel info /no/such/model 2>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_usage_error_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "model", "--temp", "warm"])
    assert "\nonekernel generate: error: argument --temp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["generate", "model", "--temperatur", "1"], "there is no flag --temperatur; did you mean --temperature?"),
        (["generate", "model", "--tmep=1"], "there is no flag --tmep; did you mean --temp?"),
        (["chat", "model", "--top_k", "3"], "there is no flag --top_k; did you mean --top-k?"),
        (["serve", "model", "--max"], "there is no flag --max; did you mean --max-body-bytes or --max-choices?"),
        (["info", "model", "--xyzzy"], "there is no flag --xyzzy; `onekernel info --help` lists them"),
        (["env", "-q"], "there is no flag -q; `onekernel env --help` lists them"),
        (["generate", "model", "hello"], "unexpected argument 'hello'"),
    ],
)
def test_an_unknown_flag_gets_the_command_s_usage_and_the_nearest_flag(
    arguments: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: onekernel {arguments[0]} ")
    assert error == f"onekernel {arguments[0]}: error: {refusal}"
