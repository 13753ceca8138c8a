"""`chat` with its lines through a pipe: commands, errors and what the model gets to see."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onekernel.errors import ContextLengthError, NumericError
from tests.unit.cli.fakes import FakeLLM, Script, run

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Enter lines; return exit code, stdout and stderr."""

    def enter(llm: FakeLLM, *lines: str, flags: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = run(llm, ["chat", "model", *flags.split()])
        return code, *capsys.readouterr()

    return enter


def contents(llm: FakeLLM, request: int = -1) -> list[str]:
    return [message["content"] for message in llm.asked[request][0]]


def test_every_question_comes_with_what_was_said_before(chat: Chat) -> None:
    llm = FakeLLM([Script(("One",)), Script(("Two",))])
    code, out, _ = chat(llm, "a", "", "b")
    assert (code, out) == (0, "One\nTwo\n")
    assert contents(llm) == ["a", "One", "b"]


def test_a_pipe_of_bytes_that_are_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    assert run(FakeLLM(), ["chat", "model"]) == 2
    assert "error: standard input is not UTF-8 text: byte 0xff\n" in capsys.readouterr().err


def test_thinking_is_not_sent_back(chat: Chat) -> None:
    llm = FakeLLM([Script(("~hm", "One")), Script(("Two",))])
    _, out, err = chat(llm, "a", "b")
    assert out == "One\nTwo\n"
    assert "hm\n" in err
    assert contents(llm) == ["a", "One", "b"]


def test_system_by_flag_and_by_command(chat: Chat) -> None:
    llm = FakeLLM()
    _, _, err = chat(llm, "/system", "a", "/system Be very brief.", "b", flags="--system Hurry")
    assert "\nHurry\n" in err
    assert contents(llm, 0) == ["Hurry", "a"]
    assert contents(llm, 1) == ["Be very brief.", "a", "Hello world", "b"]


def test_clear_undo_and_regen(chat: Chat) -> None:
    llm = FakeLLM([Script((word,)) for word in ("One", "Two", "Three")])
    chat(llm, "a", "/clear", "b", "/regen", "/undo", "c")
    assert [contents(llm, number) for number in range(4)] == [["a"], ["b"], ["b"], ["c"]]


def test_regen_draws_another_seed_unless_greedy(chat: Chat) -> None:
    llm = FakeLLM()
    _, _, err = chat(llm, "a", "/regen", flags="--seed 5 --temp 1")
    assert [params.seed for _, params, _ in llm.asked] == [5, None]
    assert "greedy" not in err
    assert "greedy: the answer will be the same" in chat(llm, "a", "/regen")[2]


def test_a_regen_that_fails_keeps_the_old_answer(chat: Chat) -> None:
    llm = FakeLLM([Script(("One",)), Script([NumericError("not finite")]), Script(("Two",))])
    chat(llm, "a", "/regen", "b")
    assert contents(llm) == ["a", "One", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nonsense", "there is no command /nonsense; /help lists them"),
        ("/regen", "there is no question to answer again"),
        ("/undo", "there is no turn to take back"),
        ("/save", "/save needs a file name"),
        ("/save ~nobody-at-all/file", "~nobody-at-all/file cannot be written: No such file or directory"),
        ("/save /no/such/folder/file", "/no/such/folder/file cannot be written: No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_is_an_error_and_no_prompt(line: str, message: str, chat: Chat) -> None:
    llm = FakeLLM()
    code, out, err = chat(llm, line)
    assert (code, out, llm.asked) == (0, "", [])
    assert f"error: {message}" in err


def test_a_line_may_begin_with_a_slash_after_a_space(chat: Chat) -> None:
    llm = FakeLLM()
    chat(llm, " /etc is what?")
    assert contents(llm) == [" /etc is what?"]


def test_help_lists_every_command_and_exit_leaves(chat: Chat) -> None:
    llm = FakeLLM()
    code, out, err = chat(llm, "/help", "/exit", "never sent")
    assert (code, out, llm.asked) == (0, "", [])
    assert all(command in err for command in ("/system", "/clear", "/regen", "/undo", "/save", "/exit"))


def test_save_writes_messages_and_overwrites_only_its_own_file(chat: Chat, tmp_path: Path) -> None:
    other, mine = tmp_path / "other.json", tmp_path / "mine.json"
    other.write_text("precious")
    _, _, err = chat(FakeLLM(), "a", f"/save {mine}", "b", f"/save {mine}", f"/save {other}")
    assert json.loads(mine.read_text()) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "Hello world"},
    ]
    assert other.read_text() == "precious"
    assert f"error: {other} exists" in err


def test_a_question_that_does_not_fit_leaves_the_conversation_as_it_was(chat: Chat) -> None:
    llm = FakeLLM([Script(("One",)), Script([ContextLengthError(150, 100, 4096)]), Script(("Two",))])
    code, _, err = chat(llm, "a", "long", "b")
    assert code == 0
    assert contents(llm) == ["a", "One", "b"]
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    for part in ("the context is full", "150 tokens", "100.", "/undo", "/clear", "--ctx-size", "4096"):
        assert part in line


def test_a_question_that_was_not_even_encoded_has_at_least_so_many_tokens(chat: Chat) -> None:
    _, _, err = chat(FakeLLM([Script([ContextLengthError(150, 100, 4096, at_least=True)])]), "long")
    assert "with this question the conversation has at least 150 tokens and the context 100" in err


def test_an_answer_that_fills_the_context_is_kept_and_said(chat: Chat) -> None:
    llm = FakeLLM([Script(("One",), finish="length", completion_tokens=89), Script(("Two",))])
    _, _, err = chat(llm, "a", "b")  # 11 prompt tokens and 89 are the whole context of 100
    assert "the context is full: 100 of 100 tokens, and the answer was cut" in err
    assert contents(llm) == ["a", "One", "b"]


def test_an_answer_cut_by_max_tokens_says_so(chat: Chat) -> None:
    _, _, err = chat(FakeLLM([Script(("One",), finish="length")]), "a", flags="-n 1")
    assert "[cut after 1 tokens, the limit of --max-tokens]" in err


def test_a_failed_answer_does_not_end_the_chat(chat: Chat) -> None:
    llm = FakeLLM([Script(("On", NumericError("not finite"))), Script(("Two",))])
    code, out, err = chat(llm, "a", "b")
    assert (code, out) == (0, "On\nTwo\n")
    assert "error: not finite (the conversation is as before)" in err
    assert contents(llm) == ["b"]


def test_a_broken_engine_ends_the_chat(chat: Chat) -> None:
    from onekernel.errors import EngineClosedError

    code, _, err = chat(FakeLLM([Script([EngineClosedError("the engine failed earlier")])]), "a", "b")
    assert code == 1
    assert "error: the engine failed earlier" in err


def test_a_model_without_a_template_cannot_chat(chat: Chat) -> None:
    code, _, err = chat(FakeLLM(chat_template=None), "a")
    assert code == 1
    assert "no chat template, so it cannot chat; use `onekernel generate`" in err


def test_chat_has_no_json(chat: Chat) -> None:
    with pytest.raises(SystemExit) as stop:
        chat(FakeLLM(), flags="--json")
    assert stop.value.code == 2


def test_template_options_reach_the_template(chat: Chat) -> None:
    llm = FakeLLM()
    chat(llm, "a", flags='--chat-template-kwargs {"x":1}')
    template: dict[str, Any] = llm.asked[0][2]
    assert template == {"x": 1}
