"""`generate`: where the prompt comes from, what goes to stdout and what to stderr."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onekernel.cli.report import timings_line
from onekernel.engine.request import Completion, Timings, Usage
from tests.unit.cli.fakes import FakeLLM, Script, run

USER = {"role": "user", "content": "Hi?"}
TIMINGS = "load 1.2 s | prompt 11 tokens, 200 tok/s | TTFT 95 ms | decode 10.0 tok/s (2 tokens) | seed 123"


class Pipe(io.TextIOWrapper):
    """Standard input with these bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="ascii")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda content: monkeypatch.setattr(sys, "stdin", Pipe(content))


def test_text_on_stdout_and_the_rest_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM()
    assert run(llm, ["generate", "model", "-p", "Hi?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello world\n"
    assert err == f"device cpu (fake)\n{TIMINGS}\n"  # no bar and no escape sequence: stderr is no terminal
    assert llm.closed


def test_the_model_gets_what_the_flags_say() -> None:
    llm = FakeLLM()
    flags = "-m model -c 64 -t 2 --dtype bf16 --device cpu --revision main --load-format dummy --temp 0.5 --seed 9"
    run(llm, ["generate", *flags.split(), "-p", "Hi?", "--chat-template-kwargs", '{"enable_thinking": false}'])
    [(name, options)] = llm.made
    del options["listener"]
    assert name == "model"
    assert options == {
        "device": "cpu",
        "dtype": "bfloat16",
        "max_context": 64,
        "backend": "auto",
        "threads": 2,
        "slice_tokens": 64,
        "max_waiting": 256,
        "prefix_cache": True,
        "kv_tokens": 0,  # the cache of one context: there is one request
        "sparse": "auto",
        "revision": "main",
        "load_format": "dummy",
    }
    [(prompt, params, template)] = llm.asked
    assert prompt == [USER]
    assert (params.temperature, params.seed) == (0.5, 9)
    assert template == {"enable_thinking": False}


def test_verbose_says_more(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeLLM(), ["generate", "model", "-p", "Hi?", "-v"])
    err = capsys.readouterr().err
    assert "weights: 0.10 s" in err
    assert "import: " in err


@pytest.mark.parametrize("arguments", [["-p", "-"], ["-f", "-"], []])
def test_the_prompt_may_come_through_standard_input(arguments: list[str], pipe: Any) -> None:
    pipe(b"Hi?\n")
    llm = FakeLLM()
    assert run(llm, ["generate", "model", *arguments]) == 0
    assert llm.asked[0][0] == [USER]


def test_the_prompt_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("é\r\nzwei\n\n".encode())
    llm = FakeLLM()
    assert run(llm, ["generate", "model", "-f", str(file), "--raw"]) == 0
    assert llm.asked[0][0] == "é\r\nzwei\n"


def test_a_given_prompt_leaves_standard_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(FakeLLM(), ["generate", "model", "-p", "Hi?"]) == 0


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["-p", ""], b"", "the prompt is empty; give some text with"),
        ([], b"\n", "the prompt is empty; give some text with"),
        ([], b"x" * 1001, "standard input holds more than 1000 bytes; give a shorter text"),
        (["-f", "/dev/zero"], b"", "/dev/zero holds more than 1000 bytes; give a shorter text"),
        ([], b"ab\xff", "standard input is not UTF-8 text: byte 2 is 0xff"),
        (["-f", "/no/such/file"], b"", "/no/such/file cannot be read: No such file or directory"),
        (["-p", "x", "--logprobs", "2"], b"", "--logprobs is shown only with --json"),
        (["-p", "x", "--json", "--logprobs", "21"], b"", "--logprobs is 21; it must be a whole number from 0 to 20"),
        (["-p", "x", "--raw", "--system", "y"], b"", "--system and --chat-template-kwargs go to the chat template"),
    ],
)
def test_a_prompt_or_flag_that_cannot_be_is_refused_before_loading(
    arguments: list[str],
    content: bytes,
    message: str,
    pipe: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onekernel.cli.text_input.MAX_BYTES", 1000)
    pipe(content)
    llm = FakeLLM()
    assert run(llm, ["generate", "model", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"error: {message}"), llm.made) == ("", True, [])


def test_without_a_prompt_on_a_terminal_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Pipe(b"")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert run(FakeLLM(), ["generate", "model"]) == 2
    assert "there is no prompt; give it with -p TEXT" in capsys.readouterr().err


def test_raw_and_models_without_a_template_take_the_text_itself(capsys: pytest.CaptureFixture[str]) -> None:
    raw, plain = FakeLLM(), FakeLLM(chat_template=None)
    run(raw, ["generate", "model", "-p", "Hi?", "--raw"])
    assert raw.asked[0][0] == "Hi?"
    capsys.readouterr()
    run(plain, ["generate", "model", "-p", "Hi?"])
    assert plain.asked[0][0] == "Hi?"
    assert "the model has no chat template" in capsys.readouterr().err
    assert run(plain, ["generate", "model", "-p", "Hi?", "--system", "Be brief."]) == 2


def test_the_system_message_comes_first() -> None:
    llm = FakeLLM()
    run(llm, ["generate", "model", "-p", "Hi?", "--system", "Be brief."])
    assert llm.asked[0][0] == [{"role": "system", "content": "Be brief."}, USER]


def test_json_is_one_object_and_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM([Script(("~hm", "Hé"))])
    assert run(llm, ["generate", "model", "-p", "Hi?", "--json", "--logprobs", "0"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    timings = found.pop("timings")
    assert found == {
        "text": "Hé",
        "thinking": "hm",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "seed": 123,
        "logprobs": [{"id": 7, "token": "é", "bytes": [195, 169], "logprob": -0.5, "top_logprobs": []}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 2, "cached_tokens": 0, "total_tokens": 13},
        "model": "fake-model",
        "backend": "reference",
        "device": "cpu",
        "dtype": "bfloat16",
    }
    assert timings == {
        "prompt_n": 10,
        "prompt_ms": 50.0,
        "prompt_per_second": 200.0,
        "predicted_n": 2,
        "predicted_ms": 100.0,
        "predicted_per_second": 10.0,
        "ttft_ms": 95.0,
        "queue_ms": 1.0,
        "load_s": 1.25,
    }
    assert TIMINGS in err


def test_thinking_stays_out_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeLLM([Script(("~Let me", "~ see.", "Paris."))]), ["generate", "model", "-p", "Hi?"])
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "Let me see.\n" in err


def test_an_answer_that_fails_midway_keeps_what_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from onekernel.errors import NumericError

    llm = FakeLLM([Script(("Hello", NumericError("the logits of token 2 are not finite")))])
    assert run(llm, ["generate", "model", "-p", "Hi?"]) == 1
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert err.endswith("error: the logits of token 2 are not finite\n")


def test_an_answer_of_one_token_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    run(FakeLLM([Script(("Hello",))]), ["generate", "model", "-p", "Hi?"])
    assert capsys.readouterr().err.endswith("| decode (1 tokens) | seed 123\n")


def test_an_answer_stopped_before_its_first_token_has_no_time_to_it() -> None:
    completion = Completion("", "", (), "cancelled", Usage(3, 0), Timings(prefill_tokens=2), seed=7)
    assert timings_line(completion, 1.0) == "load 1.0 s | prompt 3 tokens | no token | decode (0 tokens) | seed 7"
