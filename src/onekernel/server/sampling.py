"""A request's members -> sampling parameters of each of its choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onekernel.config import SamplingParams
from onekernel.server.api_error import bad_request
from onekernel.server.fields import Generation
from onekernel.server.settings import ServerSettings

_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_params(
    body: Generation,
    generation_config: Mapping[str, Any],
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> list[SamplingParams]:
    """Return the parameters of each choice; what is not given comes from the model's generation_config.json.

    Where neither says, top_k is 0 as in OpenAI's API, not the 50 of transformers and the command line. A seed below 0
    is taken modulo 2**64, -1 means none as in llama.cpp; choice i of a seeded request gets seed + i.

    Raises ConfigError from `SamplingParams`, ApiError for what only a server limits.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    if given["top_k"] is None and generation_config.get("top_k") is None:
        given["top_k"] = 0
    if given["top_k"] == -1:  # vLLM's way to say all
        given["top_k"] = 0
    seed = None if body.seed == -1 else body.seed
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise bad_request(f"seed is {seed}; it must be from {-(2**63)} to {2**64 - 1}", "seed", "invalid_value")
    params = SamplingParams(
        **given,
        max_tokens=None if max_tokens == -1 else max_tokens,
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=logprobs,
        stop=_stops(body.stop, settings),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )
    count = choices(body, settings)
    return [replace(params, seed=None if seed is None else (seed + index) % 2**64) for index in range(count)]


def choices(body: Generation, settings: ServerSettings) -> int:
    """Return how many answers are asked for; raises ApiError outside 1 to `max_choices`."""
    count = 1 if body.n is None else body.n
    if not 1 <= count <= settings.max_choices:
        raise bad_request(f"n is {count}; this server gives 1 to {settings.max_choices} choices", "n", "invalid_value")
    return count


def _stops(stop: str | list[str] | None, settings: ServerSettings) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > settings.max_stops:
        raise bad_request(
            f"there are {len(stops)} stop strings; at most {settings.max_stops} are allowed", "stop", "invalid_value"
        )
    if any(not text for text in stops):
        raise bad_request("a stop string is empty; leave it out", "stop", "invalid_value")
    longest = max(map(len, stops), default=0)
    if longest > 1000:
        raise bad_request(f"a stop string has {longest} characters; at most 1000 are allowed", "stop", "invalid_value")
    return stops


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise bad_request(f"logit_bias has the key {key[:40]!r}; keys are token ids", "logit_bias", "invalid_value")
    return {int(key): value for key, value in bias.items()}
