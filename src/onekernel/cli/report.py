"""A finished answer as a line of timings and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onekernel.engine.request import Completion, TokenLogprob
    from onekernel.llm import LLM


def timings_line(completion: Completion, load_s: float) -> str:
    """Return one line: load time, prompt and its rate, time to the first token, decode rate, seed."""
    timings, usage = completion.timings, completion.usage
    prompt = f"prompt {usage.prompt_tokens} tokens"
    if timings.prefill_tokens_per_s:
        prompt += f", {_rate(timings.prefill_tokens_per_s)}"
    decode = f"({usage.completion_tokens} tokens)"
    if timings.decode_tokens_per_s:
        decode = f"{_rate(timings.decode_tokens_per_s)} {decode}"
    first = f"TTFT {timings.ttft_ms:.0f} ms" if usage.completion_tokens else "no token"
    return f"load {load_s:.1f} s | {prompt} | {first} | decode {decode} | seed {completion.seed}"


def completion_json(completion: Completion, llm: LLM) -> dict[str, Any]:
    """Return everything about an answer. `timings` has llama.cpp's keys (its server's README) and ours.

    prompt_* is about prefill, all prompt tokens but the last; predicted_ms is from the first token to the last, so its
    rate is over predicted_n - 1. `active_neurons`, of sparse feed-forwards in the megakernel, is a mean for each layer.
    """
    loaded, timings, usage = llm.loaded, completion.timings, completion.usage
    active = getattr(loaded.engine.backend, "active_neurons", None)
    return {
        "text": completion.text,
        "thinking": completion.thinking,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "logprobs": None if completion.logprobs is None else [_logprob(entry) for entry in completion.logprobs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "total_tokens": usage.total_tokens,
        },
        "timings": {
            "prompt_n": timings.prefill_tokens,
            "prompt_ms": timings.prefill_ms,
            "prompt_per_second": timings.prefill_tokens_per_s,
            "predicted_n": timings.decode_tokens,
            "predicted_ms": timings.decode_ms,
            "predicted_per_second": timings.decode_tokens_per_s,
            "ttft_ms": timings.ttft_ms,
            "queue_ms": timings.queue_ms,
            "load_s": loaded.load_s,
        },
        "model": loaded.settings.name,
        "backend": loaded.engine.backend.name,
        "device": loaded.engine.backend.device,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        **({} if active is None else {"active_neurons": list(active)}),
    }


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    own = {"id": entry.token_id, "token": entry.text, "bytes": list(entry.bytes), "logprob": entry.logprob}
    return own | {
        "top_logprobs": [
            {"id": top.token_id, "token": top.text, "bytes": list(top.bytes), "logprob": top.logprob}
            for top in entry.top
        ]
    }


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f} tok/s" if tokens_per_s >= 100 else f"{tokens_per_s:.1f} tok/s"
