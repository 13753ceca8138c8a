"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onekernel.engine.request import TokenLogprob

IMPOSSIBLE = -9999.0
"""What OpenAI's API has for the logarithm of 0, which JSON cannot hold."""


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return the logprobs object of a chat choice; None if there are no entries."""
    if not entries:
        return None
    return {
        "content": [{**_entry(entry), "top_logprobs": [_entry(top) for top in entry.top]} for entry in entries],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenLogprob] | None, offset: int = 0) -> dict[str, Any] | None:
    """Return the logprobs object of a plain completion; `offset`: characters of text before the first entry."""
    if not entries:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [_name(entry) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_by_name(entry) for entry in entries],
        "text_offset": offsets,
    }


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "bytes": list(entry.bytes), "logprob": _finite(entry.logprob)}


def _by_name(entry: TokenLogprob) -> dict[str, float]:
    """Return the most likely tokens' logarithms and the chosen one's; of tokens with one name, the likeliest's."""
    named: dict[str, float] = {}
    for one in (*entry.top, entry):
        named.setdefault(_name(one), _finite(one.logprob))
    return named


def _name(entry: TokenLogprob) -> str:
    """Return a token's text, or its bytes as OpenAI spells them if they are no whole characters."""
    raw = bytes(entry.bytes)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
