from __future__ import annotations

from datetime import datetime

import pytest

from onekernel.errors import TemplateError
from onekernel.text.chat_template import ChatTemplate
from tests.unit.text.conversations import WEATHER, assistant, user
from tests.unit.text.families import source


@pytest.mark.complaint(
    "F6", file="text/chat_template.py", old='refused the messages: {refusal}"', new='refused the messages"'
)
@pytest.mark.parametrize(
    ("template", "words"),
    [("llama2", "Roles must alternate: user, assistant"), ("mistral", "roles must alternate user/assistant/user")],
)
def test_the_templates_own_words(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source(template)).render([user("a"), user("b")], bos_token="<s>", eos_token="</s>")


def test_a_template_that_does_not_parse_spoils_only_chats() -> None:
    template = ChatTemplate("{% for message in messages %}\n{{ message }")
    with pytest.raises(TemplateError, match="does not parse: line 2: unexpected '}'"):
        template.render([user("a")])


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ messages[0].content.missing.deeper }}", "UndefinedError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
    ],
)
def test_a_template_that_fails(template: str, cause: str) -> None:
    with pytest.raises(TemplateError, match=rf"failed on these messages \({cause}"):
        ChatTemplate(template).render([user("a")])


def test_messages_are_needed() -> None:
    with pytest.raises(TemplateError, match="no messages"):
        ChatTemplate("{{ messages[0] }}").render([])


def test_json_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0].content | tojson }}").render([user("<é & 'x'>")]) == "\"<é & 'x'>\""


def test_time() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([user("a")])
    assert year in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_named_templates() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render([user("a")]) == "plain"
    assert template.render([user("a")], tools=[WEATHER]) == "tools"
    with pytest.raises(TemplateError, match="named rag, tool_use but none named 'default'"):
        ChatTemplate({"rag": "a", "tool_use": "b"}).render([user("a")])


def test_names_inside_a_generation_block_stay_inside() -> None:
    text = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(text).render([assistant("a")]) == "21"
