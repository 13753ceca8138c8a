"""The choose phase on PyTorch: from one position's logits to one token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onekernel.config import Sampling
from onekernel.errors import ConfigError, NumericError
from onekernel.phases.choose.counts import TokenCounts
from onekernel.phases.choose.draw import draw
from onekernel.phases.choose.filters import Kept, adjust, keep, top_k

__all__ = ["Choice", "TokenCounts", "choose"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token; with logprobs asked for, its natural-log probability and (id, logprob) of the likeliest tokens.

    Probabilities are those of the raw logits, before any mask, penalty, temperature or filter.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Tensor,
    sampling: Sampling,
    position: int,
    counts: TokenCounts | None = None,
    *,
    vocab_limit: int,
    mask: Tensor | None = None,
) -> Choice:
    """Choose the token that stands at index `position` of the sequence.

    `logits` is (vocab,) of any float dtype; ids from vocab_limit on are padding and can't be chosen. `mask`, bool
    (vocab,), is True where a token is allowed. `counts` is needed if a penalty is on. Greedy takes the highest adjusted
    logit, sampling draws; equal ones go to the lower id. The result depends on the arguments alone.

    Raises NumericError if a logit below vocab_limit is NaN or infinite, ConfigError if the parameters leave no token.
    """
    raw = logits[:vocab_limit].float()
    _demand_finite(raw, position)
    scores = adjust(raw, sampling, counts, None if mask is None else mask[:vocab_limit])
    if scores is not raw:
        _demand_candidate(scores, position)
    token_id = int(scores.argmax()) if sampling.greedy else draw(keep(scores, sampling), sampling.seed, position)
    if sampling.logprobs is None:
        return Choice(token_id)
    # In float64: a float32 sum of 128256 exponentials loses the small ones beside the large, 1e-5 of the total.
    logprobs = torch.log_softmax(raw.double(), dim=-1).float()
    return Choice(token_id, float(logprobs[token_id]), _likeliest(logprobs, sampling.logprobs))


def _demand_finite(raw: Tensor, position: int) -> None:
    # One pass: a sum is finite only if all its terms are. A sum that overflows without one is counted, found innocent.
    if math.isfinite(float(raw.sum())):
        return
    count = int((~raw.isfinite()).sum())
    if count:
        raise NumericError(
            f"{count} of {len(raw)} logits at position {position} are NaN or infinite, so no token can be chosen; the "
            f"weights are damaged or a layer overflowed: check the files, or try float32"
        )


def _demand_candidate(scores: Tensor, position: int) -> None:
    best = float(scores.max())
    if best == -math.inf:
        raise ConfigError(
            f"no token is left at position {position}: the mask and logit_bias together exclude all {len(scores)}"
        )
    if not math.isfinite(best):
        raise ConfigError(f"penalties and temperature made a score of {best} at position {position}; use milder ones")


def _likeliest(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    best = top_k(Kept(torch.arange(len(logprobs), device=logprobs.device), logprobs), count)
    order = best.scores.sort(descending=True, stable=True).indices
    return tuple(zip(best.token_ids[order].tolist(), best.scores[order].tolist(), strict=True))
