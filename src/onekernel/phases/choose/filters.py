"""From raw logits to the tokens that may be drawn, in the documented order.

1. mask; 2. logit_bias; 3. repetition penalty; 4. presence and frequency penalty; 5. temperature (`adjust`);
6. top-k; 7. top-p; 8. min-p (`keep`).

It is transformers' order, where that has the filter. Each step sees the previous one's result: temperature scales the
penalized logits, top-p counts probability among what top-k kept, and min-p comes too late to change what top-p counts.
All is float32 with one rounding per operation, and ties go to the lower token id, so that the kept set is one set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onekernel.config import Sampling
from onekernel.errors import ConfigError
from onekernel.phases.choose.counts import TokenCounts
from onekernel.phases.choose.elementary import exp

BAN = -100.0
"""A logit_bias of this or less removes the token (OpenAI's API calls it a ban)."""

COLDEST = 1e-6
"""Temperatures between 0 and this count as this. Gumbel noise spans 25.7, so a lead of 3e-5 in the logits already wins
every draw; below, nothing changes except that the quotient could overflow."""

_WEIGHT_ONE = 2.0**40


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens that may still be drawn: ascending ids, int64 (n,), and their scores, float32 (n,)."""

    token_ids: Tensor
    scores: Tensor

    def take(self, chosen: Tensor) -> Kept:
        """Keep those where a bool (n,) is true, or those at ascending indices."""
        return Kept(self.token_ids[chosen], self.scores[chosen])


def adjust(logits: Tensor, sampling: Sampling, counts: TokenCounts | None, mask: Tensor | None) -> Tensor:
    """Return the scores after mask, bias, penalties and temperature, float32 (vocab,); removed tokens are -inf.

    `logits` is float32 (vocab,) and is left alone; `mask` is bool (vocab,), True where a token is allowed. Raises
    ConfigError for a bias on a token that does not exist, and for penalties without counts.
    """
    scores = logits
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sampling.logit_bias:
        scores = _biased(scores, sampling.logit_bias)
    if sampling.penalised:
        if counts is None:
            raise ConfigError("a penalty is on, but no TokenCounts were given; make them with TokenCounts.start")
        scores = _penalized(scores, sampling, counts)
    if sampling.greedy:
        return scores
    # A tensor, because PyTorch on a GPU turns division by a number into multiplication, which rounds otherwise.
    return scores / scores.new_tensor(max(sampling.temperature, COLDEST))


def keep(scores: Tensor, sampling: Sampling) -> Kept:
    """Return what top-k, top-p and min-p keep of scores (vocab,); always with the likeliest token."""
    kept = Kept(torch.arange(len(scores), device=scores.device), scores)
    kept = top_k(kept, sampling.top_k)
    kept = top_p(kept, sampling.top_p)
    return min_p(kept, sampling.min_p)


def top_k(kept: Kept, k: int) -> Kept:
    """Keep the k highest scores, exactly k: of those equal to the k-th, the lowest ids. 0 keeps all."""
    if k == 0 or k >= len(kept.scores):
        return kept
    values, indices = torch.topk(kept.scores, k + 1)
    edge = values[k - 1]
    if edge > values[k]:
        return kept.take(indices[:k].sort().values)
    above = (kept.scores > edge).nonzero()[:, 0]
    at_edge = (kept.scores == edge).nonzero()[: k - len(above), 0]
    return kept.take(torch.cat((above, at_edge)).sort().values)


def top_p(kept: Kept, p: float) -> Kept:
    """Keep the shortest run of highest scores whose probability reaches p, the token that crosses p included.

    Equal scores are taken in the order of their ids. Probabilities are whole multiples of 2**-40 of the likeliest one:
    sums of integers are exact, so whoever adds them in whatever order finds the same set.
    """
    if p >= 1.0:
        return kept
    weights = (exp(kept.scores - kept.scores.max()) * _WEIGHT_ONE).long()
    total = int(weights.sum())
    # Lighter tokens hold less than 1 - p together, so they come after the crossing and need not be sorted. (The 0.999
    # covers the rounding of `exp`, by which a higher score can weigh a little less.)
    lightest = int((1.0 - p) * total / len(weights) * 0.999)
    heavy = (weights >= lightest).nonzero()[:, 0]
    order = heavy[kept.scores[heavy].sort(descending=True, stable=True).indices]
    before = weights[order].cumsum(0) - weights[order]
    return kept.take(order[before < math.ceil(p * total)].sort().values)


def min_p(kept: Kept, p: float) -> Kept:
    """Keep tokens of at least p times the likeliest one's probability, that is, within -log(p) of its score."""
    if p == 0.0:
        return kept
    return kept.take((kept.scores - kept.scores.max() >= math.log(p)).nonzero()[:, 0])


def _biased(scores: Tensor, logit_bias: Mapping[int, float]) -> Tensor:
    token_ids = torch.tensor(list(logit_bias), device=scores.device)
    if int(token_ids.max()) >= len(scores):
        raise ConfigError(
            f"logit_bias names token {int(token_ids.max())}; the vocabulary ends at {len(scores) - 1}: leave it out"
        )
    bias = torch.tensor([-math.inf if b <= BAN else b for b in logit_bias.values()], device=scores.device)
    return scores.index_add(0, token_ids, bias.float())


def _penalized(scores: Tensor, sampling: Sampling, counts: TokenCounts) -> Tensor:
    output = counts.output[: len(scores)]
    if sampling.repetition_penalty != 1.0:
        penalty = scores.new_tensor(sampling.repetition_penalty)
        seen = counts.prompt[: len(scores)] | (output > 0)
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if sampling.presence_penalty != 0.0:
        scores = scores - (output > 0).float() * sampling.presence_penalty
    if sampling.frequency_penalty != 0.0:
        scores = scores - output.float() * sampling.frequency_penalty
    return scores
