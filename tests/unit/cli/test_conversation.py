"""The history of a chat, without a model."""

from __future__ import annotations

import pytest

from onekernel.cli.conversation import Conversation, Turn


def talk(*turns: tuple[str, str], system: str | None = None) -> Conversation:
    conversation = Conversation(system)
    for question, answer in turns:
        conversation.ask(question)
        conversation.reply(answer)
    return conversation


def test_messages_alternate_after_the_system_message() -> None:
    conversation = talk(("a", "b"), system="s")
    conversation.ask("c")
    assert conversation.messages() == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize("answer", ["", None])
def test_an_unanswered_question_is_not_sent_again(answer: str | None) -> None:
    conversation = talk(("a", "b"))
    conversation.ask("c")
    if answer is not None:
        conversation.reply(answer)
    conversation.ask("d")
    assert conversation.turns == (Turn("a", "b"), Turn("d"))


def test_undo_takes_back_one_turn_after_the_other() -> None:
    conversation = talk(("a", "b"), ("c", "d"))
    assert conversation.undo() == Turn("c", "d")
    assert conversation.undo() == Turn("a", "b")
    assert conversation.turns == ()


def test_reopen_keeps_the_question() -> None:
    conversation = talk(("a", "b"), ("c", "d"))
    conversation.reopen()
    assert [message["content"] for message in conversation.messages()] == ["a", "b", "c"]


def test_clear_keeps_the_system_message() -> None:
    conversation = talk(("a", "b"), system="s")
    conversation.clear()
    assert conversation.messages() == [{"role": "system", "content": "s"}]


def test_kept_turns_undo_anything() -> None:
    conversation = talk(("a", "b"))
    before = conversation.turns
    conversation.reopen()
    conversation.clear()
    conversation.turns = before
    assert conversation.turns == (Turn("a", "b"),)
