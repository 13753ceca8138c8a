"""A plain completion in OpenAI's form."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from onekernel.engine.request import Completion, Delta
from onekernel.server.logprobs import completion_logprobs


class CompletionForm:
    """Writes text_completion objects."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self) -> None:
        self._characters: dict[int, int] = defaultdict(int)

    def whole(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a finished choice."""
        return _choice(index, completion.text, completion_logprobs(completion.logprobs), completion.finish_reason)

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Return nothing: there is no role."""
        return []

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return a delta's text and log probabilities."""
        if not delta.text and not delta.logprobs:
            return []
        logprobs = completion_logprobs(delta.logprobs, self._characters[index])
        self._characters[index] += sum(len(entry.text) for entry in delta.logprobs)
        return [_choice(index, delta.text, logprobs, None)]

    def end(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return the finish_reason."""
        return [_choice(index, "", None, completion.finish_reason)]


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
