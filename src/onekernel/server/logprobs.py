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
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{top.text: _finite(top.logprob) for top in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "bytes": list(entry.bytes), "logprob": _finite(entry.logprob)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE
