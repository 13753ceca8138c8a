"""How many tokens a text has at least, told from its bytes: a text of megabytes takes many seconds to encode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from onekernel.text.token_bytes import METASPACE, TokenBytes

SHORT = 1 << 17
"""Characters that are encoded in no time."""

_ALIAS_BYTES = 4
"""What `special_text` may put in a special token's place: a character of a private-use plane."""
_COMPOSED = 4
"""Bytes of text that one byte of its canonical composition may stand for: at most 3, as in Hangul or the ohm sign."""
_MARKS = 3
"""The same of SentencePiece: the mark that it writes for a space stands for itself too, and has three bytes."""
_LOSSLESS = {"ByteLevel", "Digits", "Metaspace", "Split"}


class FewestTokens:
    """A lower bound for one tokenizer: no token stands for more bytes than its longest one.

    That holds where every byte of a text ends up in some token; of a tokenizer that may drop text nothing is known.
    """

    def __init__(self, backend: Backend, tokens: TokenBytes, vocab_limit: int) -> None:
        self._backend = backend
        self._tokens = tokens
        self._vocab_limit = vocab_limit

    def __call__(self, text: str, short: int = SHORT) -> int:
        """Return a number of tokens that the text has at least; 0 if nothing is known or it has under `short` chars."""
        if len(text) < short or self._most_bytes is None:
            return 0
        return -(-len(text.encode().translate(None, self._unspelled)) // self._most_bytes)

    @cached_property
    def _unspelled(self) -> bytes:
        return self._tokens.unspelled

    @cached_property
    def _most_bytes(self) -> int | None:
        """Bytes of text in one token at most; None if text may vanish or be joined without limit."""
        shrinks = self._normalizer_shrinks()
        steps = list(_steps(self._backend.pre_tokenizer))
        lossless = all(step["type"] in _LOSSLESS and step.get("behavior") != "Removed" for step in steps)
        strips = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        whole = shrinks == 1 or not self._unspelled  # else a spelled byte may be of a character that becomes another
        if shrinks is None or not lossless or strips or not whole:
            return None
        longest = max(len(self._tokens.of(token_id)) for token_id in range(self._vocab_limit))
        return shrinks * max(longest, _ALIAS_BYTES)

    def _normalizer_shrinks(self) -> int | None:
        """Return how many bytes may become one; None if that is not known."""
        most = 1 if self._tokens.byte_level else _MARKS
        for step in _steps(self._backend.normalizer):
            if step["type"] == "NFC":
                most = max(most, _COMPOSED)
            elif step["type"] == "Replace":
                if (step["pattern"], step["content"]) != ({"String": " "}, METASPACE):
                    return None
            elif step["type"] != "Prepend":
                return None
        return most


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser or a pre-tokenizer, sequences taken apart."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop()
        inner = step.get("normalizers") or step.get("pretokenizers")
        if inner is None:
            yield step
        else:
            pending += inner
