"""The bytes that each token id stands for: what streaming, logprobs and full decoding all build on.

A byte sequence has one meaning however it is cut into tokens, so decoding bytes incrementally gives the same text as
decoding them at once. The libraries' own decoders do not promise that: `tokenizers`' `ByteFallback` turns a whole run
of byte tokens into U+FFFD when its last byte is bad, after the good ones may already have been shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

from onekernel.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
METASPACE = "\u2581"


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable character for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
_CHARACTER_OF = {byte: character for character, byte in _BYTE_OF.items()}


class TokenBytes:
    """Maps ids to bytes by the rules of the tokenizer's decoder: byte-level BPE or SentencePiece.

    Raises ModelError, naming the decoder, for any other one.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        steps = _steps(backend)
        kinds = [step["type"] for step in steps]
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._leading: Literal["keep", "one space", "all spaces"] = "keep"
        if self._byte_level:
            return
        if not kinds or not _SENTENCEPIECE_STEPS.issuperset(kinds):
            raise ModelError(
                f"tokenizer.json has the decoder {' + '.join(kinds) or 'null'}; ByteLevel (byte-level BPE) and "
                f"combinations of {', '.join(sorted(_SENTENCEPIECE_STEPS))} (SentencePiece) are supported"
            )
        if any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps):
            self._leading = "all spaces"
        elif any(step["type"] == "Strip" and step.get("start") for step in steps):
            self._leading = "one space"

    def of(self, token_id: int) -> bytes:
        """Return the bytes of one token as it stands inside a text; empty for an id without a token."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._compute(token_id)
        return known

    @property
    def byte_level(self) -> bool:
        """Whether a token's text has a character for each of its bytes."""
        return self._byte_level

    @property
    def unspelled(self) -> bytes:
        """The bytes that no token stands for by itself: text of them may vanish, or be one unknown token."""
        if not self._byte_level and not getattr(self._backend.model, "byte_fallback", False):
            return bytes(range(256))
        names = [_CHARACTER_OF[byte] if self._byte_level else f"<0x{byte:02X}>" for byte in range(256)]
        return bytes(byte for byte, name in enumerate(names) if self._backend.token_to_id(name) is None)

    def of_first(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text, without the space SentencePiece puts before every text."""
        piece = self.of(token_id)
        if self._leading == "one space":
            return piece.removeprefix(b" ")
        token = self._backend.id_to_token(token_id) or ""
        if self._leading == "all spaces" and METASPACE in token:
            return token.replace(METASPACE, "").encode()
        return piece

    def join(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of a whole text."""
        ids = iter(token_ids)
        for first in ids:
            if self.of(first):
                return self.of_first(first) + b"".join(map(self.of, ids))
        return b""

    def spell(self, text: str) -> list[int]:
        """Return ids that spell `text` byte by byte or character by character, so that no longer token arises."""
        token_to_id = self._backend.token_to_id
        ids: list[int | None] = []
        for character in text:
            whole = None if self._byte_level else token_to_id(character.replace(" ", METASPACE))
            names = [_CHARACTER_OF[b] if self._byte_level else f"<0x{b:02X}>" for b in character.encode()]
            ids += [whole] if whole is not None else map(token_to_id, names)
        return [token_id for token_id in ids if token_id is not None]

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # As the library: a token with any character outside the alphabet is an added token, spelled as it is.
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(METASPACE, " ").encode()


def _steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]
