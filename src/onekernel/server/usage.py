"""Counts and times of answers in the words of OpenAI and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onekernel.engine.request import Completion


def usage(completions: Sequence[Completion], prompts: int = 1) -> dict[str, Any]:
    """Return OpenAI's usage object of choices that follow each other prompt by prompt: each prompt counts once."""
    firsts = completions[:: len(completions) // prompts]
    prompt = sum(one.usage.prompt_tokens for one in firsts)
    answers = sum(one.usage.completion_tokens for one in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(one.usage.cached_tokens for one in firsts)},
    }


def timings(completion: Completion) -> dict[str, Any]:
    """Return llama.cpp's timings object (its server's README) and our ttft_ms and queue_ms.

    prompt_* is about prefill, all prompt tokens but the last and the cached ones; predicted_ms is from the first token
    to the last, so its rates are over predicted_n - 1.
    """
    own, made = completion.timings, completion.timings.decode_tokens
    return {
        "cache_n": completion.usage.cached_tokens,
        "prompt_n": own.prefill_tokens,
        "prompt_ms": own.prefill_ms,
        "prompt_per_token_ms": own.prefill_ms / own.prefill_tokens if own.prefill_tokens else 0.0,
        "prompt_per_second": own.prefill_tokens_per_s,
        "predicted_n": made,
        "predicted_ms": own.decode_ms,
        "predicted_per_token_ms": own.decode_ms / (made - 1) if made > 1 else 0.0,
        "predicted_per_second": own.decode_tokens_per_s,
        "ttft_ms": own.ttft_ms,
        "queue_ms": own.queue_ms,
    }
