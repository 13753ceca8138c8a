from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onekernel.errors import ModelError, TemplateError
from onekernel.text.tokenizer import Tokenizer
from onekernel.text.vocab import placeholder
from tests.unit.text.conftest import Load
from tests.unit.text.conversations import assistant, system, user
from tests.unit.text.families import FAMILIES, PAIRS

WITH_BOS = {"llama2", "llama3", "mistral"}


@pytest.mark.complaint(
    "F1", file="text/tokenizer.py", old="if ids[: len(self._before)] == self._before:", new="if False:"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_bos_in_a_completion(load: Load, family: str) -> None:
    tokenizer = load(family)
    expected = 1 if family in WITH_BOS else 0
    ids = tokenizer.encode_prompt("Once upon a time")
    assert ids.count(tokenizer.bos_token_id) == expected
    if expected:
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.encode_prompt(tokenizer.special_tokens["bos_token"] + "Once upon a time").count(ids[0]) == 1


@pytest.mark.complaint(
    "F1",
    file="text/tokenizer.py",
    old="self.encode(prompt, add_special_tokens=False, parse_special=True)",
    new="self.encode(prompt, add_special_tokens=True, parse_special=True)",
)
@pytest.mark.parametrize(("family", "template"), PAIRS)
def test_one_bos_in_a_chat(load: Load, family: str, template: str) -> None:
    tokenizer = load(family, template)
    if family in WITH_BOS:
        for content in ("Hi", f"Hi {tokenizer.special_tokens['bos_token']}"):
            ids = tokenizer.encode_chat([user(content)])
            assert ids.count(tokenizer.bos_token_id) == 1
            assert ids[0] == tokenizer.bos_token_id


def test_no_eos_after_a_prompt(tmp_path: Path) -> None:
    """Settings of fine-tuned models leave add_eos_token on; a prompt that ends is nothing to continue."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    path = FAMILIES["llama2"].write(tmp_path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 1), ("</s>", 2)])
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(path, {}, {})
    assert tokenizer.encode("a", add_special_tokens=True, parse_special=True)[-1] == 2
    assert tokenizer.encode_prompt("a")[0] == 1
    assert 2 not in tokenizer.encode_prompt("a")
    assert tokenizer.encode_prompt("") == [1]


@pytest.mark.complaint(
    "F2",
    file="text/tokenizer.py",
    old="vocab.eos_token_ids | _ids(config) | _ids(generation_config)",
    new="vocab.eos_token_ids or _ids(config) | _ids(generation_config)",
)
@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, {2}),
        ({"eos_token_id": 7}, {}, {2, 7}),
        ({"eos_token_id": None}, {"eos_token_id": [8, 9]}, {2, 8, 9}),
        ({"eos_token_id": [7, 2]}, {"eos_token_id": 8}, {2, 7, 8}),
    ],
)
def test_every_end_of_sequence_id_counts(
    tmp_path: Path, config: dict[str, Any], generation_config: dict[str, Any], expected: set[int]
) -> None:
    path = FAMILIES["llama2"].write(tmp_path)
    assert Tokenizer.from_directory(path, config, generation_config).eos_token_ids == expected


def test_bos_of_the_config_if_the_tokenizer_names_none(tmp_path: Path) -> None:
    path = FAMILIES["qwen"].write(tmp_path)
    assert Tokenizer.from_directory(path, {"bos_token_id": 600}, {}).bos_token_id == 600
    assert Tokenizer.from_directory(path, {}, {}).bos_token_id is None


@pytest.mark.complaint("F5", file="text/tokenizer.py", old="if self.chat_template is None:", new="if False:")
def test_no_template_is_told_not_guessed(load: Load) -> None:
    with pytest.raises(TemplateError, match=r"no chat template.*--raw.*chat_template\.jinja"):
        load("smollm").encode_chat([user("Hi")])


def test_special_text_in_a_raw_prompt_is_parsed_and_otherwise_on_request(load: Load) -> None:
    tokenizer = load("smollm")
    end = tokenizer.special_tokens["eos_token"]
    (end_id,) = tokenizer.eos_token_ids
    assert end_id in tokenizer.encode_prompt(f"a{end}")
    plain = tokenizer.encode(f"a{end}", add_special_tokens=False, parse_special=False)
    assert end_id not in plain
    assert tokenizer.decode(plain) == f"a{end}"


@pytest.mark.complaint("E4", file="text/tokenizer.py", old="default=-1) + 1", new="default=-1) + 65")
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_from_the_limit_on_are_padding(load: Load, family: str) -> None:
    tokenizer = load(family)
    assert tokenizer.token_bytes(tokenizer.vocab_limit - 1) != b""
    assert all(tokenizer.token_bytes(tokenizer.vocab_limit + n) == b"" for n in range(100))
    assert tokenizer.decode([tokenizer.vocab_limit + 5]) == ""


def test_unpaired_surrogates(load: Load) -> None:
    r"""JSON can hold "\ud800", which is no character."""
    tokenizer = load("smollm", "smollm2")
    ids = tokenizer.encode("a\ud800b \ud83d\ude00", add_special_tokens=False, parse_special=False)
    assert tokenizer.decode(ids) == "a\ufffdb 😀"
    for end in ("", "<|im_end|>"):
        assert "a\ufffdb" in tokenizer.decode(tokenizer.encode_chat([user("a\ud800b" + end)]))


def test_the_callers_options_reach_the_template(load: Load) -> None:
    tokenizer = load("qwen", "qwen_thinking")
    closed = tokenizer.decode(tokenizer.encode_chat([user("Hi")], enable_thinking=False))
    assert closed.endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(tokenizer.encode_chat([user("Hi")])).endswith("assistant\n")
    bare = tokenizer.encode_chat([user("Hi"), assistant("Yo")], add_generation_prompt=False)
    assert tokenizer.decode(bare).endswith("Yo\n")


def test_an_option_may_replace_a_special_token(load: Load) -> None:
    tokenizer = load("llama2", "llama2")
    ids = tokenizer.encode_chat([system("</s>"), user("Hi")], bos_token="<s><s>")
    assert ids[:2] == [1, 1]
    assert ids.count(2) == 0


def test_placeholder_words_are_ids() -> None:
    tokenizer = Tokenizer.placeholder(1000)
    assert tokenizer.encode_prompt("7 12 nothing 999") == [7, 12, 0, 999]
    assert tokenizer.decode([7, 12, 999]) == "7 12 999"
    assert tokenizer.vocab_limit == 1000
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("value", ["</s>", [2, "</s>"], {"id": 2}, True, 2.0])
def test_an_end_of_sequence_id_that_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"eos_token_id is .*a token id or a list of them"):
        Tokenizer(placeholder(10), {}, {"eos_token_id": value})
