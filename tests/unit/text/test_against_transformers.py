"""transformers is the oracle: the same files, the same strings, the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onekernel.errors import TemplateError
from onekernel.text.tokenizer import Tokenizer
from tests.unit.text.conversations import CONVERSATIONS, WEATHER, user
from tests.unit.text.families import FAMILIES, PAIRS, TEXTS, source

pytestmark = pytest.mark.xdist_group("transformers")  # its import takes seconds: one worker is enough


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_text(family: str, oracle: Any, tmp_path: Path) -> None:
    FAMILIES[family].write(tmp_path)
    ours, theirs = Tokenizer.from_directory(tmp_path, {}, {}), oracle.from_pretrained(tmp_path)
    for text in [*TEXTS, *(text + " <|im_end|></s> " + text for text in TEXTS)]:
        for added in (False, True):
            expected = theirs(text, add_special_tokens=added)["input_ids"]
            assert ours.encode(text, add_special_tokens=added, parse_special=True) == expected
        for skip in (False, True):
            shown = theirs.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(expected, skip_special=skip) == shown
    assert ours.vocab_limit == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == {theirs.eos_token_id}


@pytest.mark.parametrize(("family", "template"), PAIRS)
def test_chats(family: str, template: str, oracle: Any, tmp_path: Path) -> None:
    FAMILIES[family].write(tmp_path, template)
    ours, theirs = Tokenizer.from_directory(tmp_path, {}, {}), oracle.from_pretrained(tmp_path)
    assert ours.chat_template is not None
    rendered = 0
    for name, conversation in CONVERSATIONS.items():
        options = {"add_generation_prompt": True, **conversation}
        messages = options.pop("messages")
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        except Exception:
            with pytest.raises(TemplateError):
                ours.encode_chat(messages, **options)
            continue
        rendered += 1
        assert ours.chat_template.render(messages, **ours.special_tokens, **options) == expected, name
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        # Thinking tags that are special tokens are the template's business in the history, but plain text to a user.
        parse = family == "qwen_special_think"
        assert ours.encode_chat(messages, parse_special_in_content=parse, **options) == ids, name
        # The way that content with special tokens' text takes gives the same where there is none.
        content = {"messages": messages, **options}
        assert parse or ours._special.encode_rendered(lambda hide: _render(ours, hide(content)), content) == ids, name  # noqa: B023
    assert rendered >= 10


def _render(tokenizer: Tokenizer, content: dict[str, Any]) -> str:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render(**content, **tokenizer.special_tokens)


FILES: dict[str, dict[str, str]] = {
    "jinja file": {"chat_template.jinja": source("chatml")},
    "jinja file wins over config": {
        "chat_template.jinja": source("chatml"),
        "tokenizer_config.json": json.dumps({"chat_template": "config"}),
    },
    "config": {"tokenizer_config.json": json.dumps({"chat_template": source("chatml")})},
    "named list": {
        "tokenizer_config.json": json.dumps(
            {
                "chat_template": [
                    {"name": "default", "template": source("chatml")},
                    {"name": "tool_use", "template": source("hermes")},
                ]
            }
        )
    },
    "named files": {
        "chat_template.jinja": source("chatml"),
        "additional_chat_templates/tool_use.jinja": source("hermes"),
        "additional_chat_templates/other.jinja": "other",
    },
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_places_of_the_template(files: dict[str, str], oracle: Any, tmp_path: Path) -> None:
    FAMILIES["smollm"].write(tmp_path)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            text = json.dumps({**json.loads(path.read_text()), **json.loads(text)})
        path.write_text(text)
    ours, theirs = Tokenizer.from_directory(tmp_path, {}, {}), oracle.from_pretrained(tmp_path)
    for tools in (None, [WEATHER]):
        expected = theirs.apply_chat_template([user("Hi")], tools=tools, return_dict=False, add_generation_prompt=True)
        assert ours.encode_chat([user("Hi")], tools=tools) == expected


SETTINGS: dict[str, dict[str, Any]] = {
    "special token missing from tokenizer.json": {"pad_token": "[PAD]"},
    "tokens as objects": {
        "eos_token": {
            "__type": "AddedToken",
            "content": "<|im_end|>",
            "lstrip": False,
            "rstrip": False,
            "special": True,
        }
    },
    "further special tokens": {"additional_special_tokens": ["<|tool|>", "<|im_end|>"]},
    "added_tokens_decoder": {
        "added_tokens_decoder": {
            "603": {"content": "<|late|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
            "604": {"content": "plain_word", "special": False, "normalized": True, "lstrip": False, "rstrip": False},
        }
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_named_only_in_the_settings(settings: dict[str, Any], oracle: Any, tmp_path: Path) -> None:
    FAMILIES["smollm"].write(tmp_path, **settings)
    ours, theirs = Tokenizer.from_directory(tmp_path, {}, {}), oracle.from_pretrained(tmp_path)
    text = "a [PAD] b <|tool|><|im_end|> plain_word <|late|> c"
    ids = ours.encode(text, add_special_tokens=False, parse_special=True)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_limit == len(theirs)
    assert ours.eos_token_ids == {theirs.eos_token_id}


def test_special_tokens_map(oracle: Any, tmp_path: Path) -> None:
    FAMILIES["smollm"].write(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    ours, theirs = Tokenizer.from_directory(tmp_path, {}, {}), oracle.from_pretrained(tmp_path)
    assert ours.eos_token_ids == {theirs.eos_token_id} == {ours.encode_prompt("<|endoftext|>")[0]}
