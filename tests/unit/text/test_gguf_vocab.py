from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.text.tokenizer import Tokenizer
from onekernel.weights.gguf import GgufCheckpoint
from tests.unit.text.conftest import Load
from tests.unit.text.conversations import user
from tests.unit.text.families import FAMILIES, TEXTS, source

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata_of(family: str, pre: str | None) -> dict[str, Any]:
    """Write a family's byte-level tokenizer as a GGUF converter would, with five padding tokens."""
    backend = FAMILIES[family].build()
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    size = max(backend.get_vocab().values()) + 1
    tokens = [backend.id_to_token(i) for i in range(size)] + [f"[PAD{n}]" for n in range(5)]
    kinds = [NORMAL] * size + [UNUSED] * 5
    for i, token in added.items():
        kinds[i] = CONTROL if token.special else USER_DEFINED
    ids = {name: backend.token_to_id(text) for name, text in FAMILIES[family].config.items() if text is not None}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.chat_template": source("chatml"),
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **({"tokenizer.ggml.bos_token_id": ids["bos_token"]} if "bos_token" in ids else {}),
        "tokenizer.ggml.eos_token_id": ids["eos_token"],
    }


@pytest.mark.parametrize(
    ("family", "pre"), [("gpt2", "gpt-2"), ("smollm", "smollm"), ("llama3", "llama-bpe"), ("qwen", "qwen2")]
)
def test_ids_are_those_of_the_families_own_files(load: Load, family: str, pre: str) -> None:
    ours, theirs = Tokenizer.from_gguf(metadata_of(family, pre), {}, {}), load(family)
    for text in [*TEXTS, *FAMILIES[family].config.values(), "a<|im_end|> <tool_call>b</tool_call>1234"]:
        if text is not None:
            assert ours.encode_prompt(text) == theirs.encode_prompt(text)
            for parse in (False, True):
                options = {"add_special_tokens": False, "parse_special": parse}
                assert ours.encode(text, **options) == theirs.encode(text, **options)
    assert ours.vocab_limit == theirs.vocab_limit
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.skipped_token_ids == theirs.skipped_token_ids


def test_words_of_other_pre_tokenizers() -> None:
    def words(pre: str | None, text: str) -> list[str]:
        tokenizer = Tokenizer.from_gguf(metadata_of("gpt2", pre), {}, {})
        return [word for word, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]

    assert words("tekken", "HelloWorld 123/\n") == ["Hello", "World", "Ġ", "1", "2", "3", "/Ċ"]
    assert words("llama-bpe", "It'S 12345!\n\n a") == ["It", "'S", "Ġ", "123", "45", "!ĊĊ", "Ġa"]
    assert words("qwen2", "it's 123") == ["it", "'s", "Ġ", "1", "2", "3"]
    assert words("gpt-2", "it's 123") == ["it", "'s", "Ġ123"]
    assert words("smollm", "it's 123") == ["it", "'s", "Ġ", "1", "2", "3"]
    assert words("default", "x=1234 (a)") == ["x", "=", "123", "4", "Ġ", "(", "a", ")"]
    assert words(None, "x=1234 (a)") == words("default", "x=1234 (a)")


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'superbpe'.*known are .*default.*smollm.*safetensors"):
        Tokenizer.from_gguf(metadata_of("gpt2", "superbpe"), {}, {})


def test_another_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'; gpt2 .* llama"):
        Tokenizer.from_gguf({**metadata_of("gpt2", None), "tokenizer.ggml.model": "rwkv"}, {}, {})
    with pytest.raises(UnsupportedModelError, match="is None"):
        Tokenizer.from_gguf({"general.architecture": "llama"}, {}, {})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", [], "no tokenizer.ggml.tokens"),
        ("merges", None, "no tokenizer.ggml.merges"),
        ("merges", ["Ġ nonsense"], "do not fit together"),
        ("token_type", [1, 2], "2 token types"),
    ],
)
def test_damaged_lists(key: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_gguf({**metadata_of("gpt2", "gpt-2"), f"tokenizer.ggml.{key}": value}, {}, {})


def test_bos_and_eos_of_the_metadata() -> None:
    metadata = metadata_of("llama3", "llama-bpe")
    eom = metadata["tokenizer.ggml.tokens"].index("<|eom_id|>")
    assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.eom_token_id": eom}, {}, {}).eos_token_ids == {
        metadata["tokenizer.ggml.eos_token_id"],
        eom,
    }
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert Tokenizer.from_gguf(metadata, {}, {}).encode_prompt("a")[0] == bos
    without = {**metadata, "tokenizer.ggml.add_bos_token": False}
    assert bos not in Tokenizer.from_gguf(without, {}, {}).encode_prompt("a")


def test_numpy_values_are_fine() -> None:
    metadata = metadata_of("llama3", "llama-bpe")
    arrays = {
        **metadata,
        "tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"], np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(metadata["tokenizer.ggml.bos_token_id"]),
    }
    ours, theirs = Tokenizer.from_gguf(arrays, {}, {}), Tokenizer.from_gguf(metadata, {}, {})
    assert ours.encode_prompt("a<|eot_id|>b") == theirs.encode_prompt("a<|eot_id|>b")
    assert ours.bos_token_id == theirs.bos_token_id


def test_chat_templates() -> None:
    metadata = {**metadata_of("smollm", "smollm"), "tokenizer.chat_templates": ["tool_use"]}
    metadata["tokenizer.chat_template.tool_use"] = source("hermes")
    template = Tokenizer.from_gguf(metadata, {}, {}).chat_template
    assert template is not None
    assert template.sources == {"default": source("chatml"), "tool_use": source("hermes")}
    del metadata["tokenizer.chat_template"], metadata["tokenizer.chat_templates"]
    assert Tokenizer.from_gguf(metadata, {}, {}).chat_template is None


PIECES = ["▁", *"abcdes<>/", "▁a", "ab", "bc", "abc", "▁ab", "cd", "▁abc", "de", "cde", "bcd", "abcd", "s>", "</", "▁▁"]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: the later a piece, the lower its score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES, "[INST]"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    scores = [0.0] * 259 + [float(-n) for n in range(len(PIECES))] + [0.0]
    metadata = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def best_pair_first(text: str) -> list[str]:
    """SentencePiece's algorithm as published: merge the pair that makes the best piece, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(PIECES.index(a + b), n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not pairs:
            return parts
        _, n = min(pairs)
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer._backend.id_to_token(i) for i in ids]


@given(st.text(alphabet="abcde </s>", min_size=1, max_size=12))
def test_scores_become_the_merges_of_sentencepiece(text: str) -> None:
    tokenizer = SENTENCEPIECE
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert pieces(tokenizer, ids) == best_pair_first(text)
    assert tokenizer.decode(ids) == text


SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece(), {}, {})


def test_sentencepiece_around_special_tokens() -> None:
    assert pieces(SENTENCEPIECE, SENTENCEPIECE.encode_prompt("ab</s>[INST]é")) == [
        *("<s>", "▁ab", "</s>", "[INST]"),
        *("▁", "<0xC3>", "<0xA9>"),
    ]
    assert SENTENCEPIECE.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert SENTENCEPIECE.eos_token_ids == {2}
    plain = SENTENCEPIECE.encode("</s>", add_special_tokens=False, parse_special=False)
    assert pieces(SENTENCEPIECE, plain) == ["▁", "</", "s>"]


def test_sentencepiece_without_the_space_in_front() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False), {}, {})
    ids = tokenizer.encode_prompt("ab a")
    assert pieces(tokenizer, ids) == ["ab", "▁a"]
    assert tokenizer.decode(ids) == "ab a"
    assert tokenizer.decode(ids[1:]) == " a"


def test_sentencepiece_needs_scores() -> None:
    with pytest.raises(ModelError, match="but 3 scores"):
        Tokenizer.from_gguf(sentencepiece(scores=[0.0, 1.0, 2.0]), {}, {})


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    checkpoint = GgufCheckpoint(smollm2_gguf)
    metadata = checkpoint.settings.tokenizer.gguf_metadata
    checkpoint.close()
    assert metadata is not None
    return Tokenizer.from_gguf(metadata, checkpoint.settings.config, checkpoint.settings.generation_config)


def test_the_real_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_limit == 49152
    assert smollm2.eos_token_ids == {2}
    assert smollm2.bos_token_id == 1
    assert smollm2.encode_prompt("The capital of France is") == [504, 3575, 282, 4649, 314]
    chat = smollm2.encode_chat([user("What is the capital of France?")])
    assert smollm2.decode(chat, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode_prompt(text)) == text


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_the_real_smollm2_against_transformers(smollm2: Tokenizer, smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)  # takes 10 to 30 s
    for text in [*TEXTS, *(f"{text}<|im_end|>{text}" for text in TEXTS)]:
        assert smollm2.encode_prompt(text) == theirs(text)["input_ids"]
        messages = [user(text.replace("<|im_end|>", ""))]
        options = {"add_generation_prompt": True, "return_dict": False}
        assert smollm2.encode_chat(messages) == theirs.apply_chat_template(messages, **options)
