"""A GGUF file's `tokenizer.*` key/value pairs -> vocabulary, named special tokens and chat template.

Keys are those of the GGUF specification. A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of holding it;
the splitting rules by name are the published ones of each family's tokenizer.json, or llama.cpp's where that defined
the name (`default`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from numbers import Integral
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import TemplateProcessing

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.text.token_bytes import METASPACE
from onekernel.text.vocab import Vocab


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(*patterns: str) -> Callable[[], PreTokenizer]:
    """Return a maker of a byte-level pre-tokenizer that applies the patterns one after another."""
    return lambda: pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_DEFAULT = _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _single_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "smaug-bpe", "dbrx"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _split(_QWEN2)),
    "tekken": _split(_TEKKEN),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken"}
"""Their vocabularies hold words that no chain of merges reaches; they have a BOS unless the file says otherwise."""

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the specification
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_SENTENCEPIECE_DEFAULTS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_metadata(metadata: Mapping[str, Any]) -> Vocab:
    """Build the tokenizer that a GGUF's metadata describes.

    Raises UnsupportedModelError for a vocabulary or pre-tokenizer of unknown kind (by name, with those known), and
    ModelError for missing or inconsistent lists.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = fields.get("model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the GGUF's tokenizer.ggml.model is {model!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are "
            "supported: use the model's safetensors version with its tokenizer.json"
        )
    if model == "llama":
        fields = _SENTENCEPIECE_DEFAULTS | fields
    tokens = _strings(fields, "tokens")
    kinds = list(fields.get("token_type", [_Kind.NORMAL] * len(tokens)))
    if len(kinds) != len(tokens):
        raise ModelError(f"the GGUF has {len(tokens)} tokens but {len(kinds)} token types; fetch the file again")
    build = _byte_level if model == "gpt2" else _sentencepiece
    try:
        backend = build(fields, tokens, kinds)
    except ModelError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"the GGUF's vocabulary and merges do not fit together: {error}; fetch it again") from error
    _add_tokens(backend, tokens, kinds)
    special = {
        name: tokens[i] for name, key in _NAMED_TOKENS.items() if (i := _token_id(fields, key, tokens)) is not None
    }
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    adds_bos = fields.get("add_bos_token", model == "llama" or fields.get("pre") in _WHOLE_WORDS_FIRST)
    if adds_bos and (bos := special.get("bos_token")) is not None:
        backend.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, int(fields["bos_token_id"]))]
        )
    ends = (_token_id(fields, key, tokens) for key in _END_KEYS)
    return Vocab(backend, special, frozenset(i for i in ends if i is not None), _templates(metadata))


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Backend:
    pre = fields.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF's tokenizer.ggml.pre is {pre!r}, a way of splitting text that is not known here; known are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}: use the model's safetensors version with its tokenizer.json"
        )
    merges = [_pair(merge) for merge in _strings(fields, "merges")]
    backend = Backend(BPE(_vocabulary(tokens, kinds), merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Backend:
    scores = fields.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"the GGUF has {len(tokens)} tokens but {len(scores or ())} scores; fetch the file again")
    unknown = _token_id(fields, "unknown_token_id", tokens)
    backend = Backend(
        BPE(
            _vocabulary(tokens, kinds),
            _merges(tokens, kinds, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = fields.get("add_space_prefix", True)
    prepend = [normalizers.Prepend(METASPACE)] if space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", METASPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece makes: always the pair whose union has the best score.

    Control, byte and unknown tokens take no part, so plain text never becomes one of them.
    """
    mergeable = {
        token: (-score, token_id)
        for token_id, (token, kind, score) in enumerate(zip(tokens, kinds, scores, strict=True))
        if kind in (_Kind.NORMAL, _Kind.USER_DEFINED)
    }
    found = []
    for token, rank in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                found.append((rank, mergeable[left], mergeable[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Return token -> id without the unused ones, with which converters fill up a padded embedding."""
    return {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _Kind.UNUSED}


def _add_tokens(backend: Backend, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Make control tokens special, and user-defined ones units that no merge crosses."""
    typed = list(zip(tokens, kinds, strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == _Kind.CONTROL]
    units = [AddedToken(token, normalized=False) for token, kind in typed if kind == _Kind.USER_DEFINED]
    backend.add_special_tokens(control)
    # The normaliser has not yet written spaces as U+2581 where these are looked for; merges reach pieces that have any.
    backend.add_tokens([unit for unit in units if METASPACE not in unit.content])


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name: metadata[f"{key}.{name}"] for name in metadata.get(f"{key}s", ()) if f"{key}.{name}" in metadata}
    return named | ({"default": metadata[key]} if metadata.get(key) else {})


def _token_id(fields: Mapping[str, Any], key: str, tokens: Sequence[str]) -> int | None:
    value = fields.get(key)
    return int(value) if isinstance(value, Integral) and 0 <= int(value) < len(tokens) else None


def _strings(fields: Mapping[str, Any], name: str) -> Sequence[str]:
    value = fields.get(name)
    if value is None or len(value) == 0:
        raise ModelError(f"the GGUF has no tokenizer.ggml.{name}; use a file that holds its tokenizer")
    return list(value)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
