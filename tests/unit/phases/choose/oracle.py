"""What the choose phase should do, written a second time: lists of Python floats (float64), full sorts, no shortcuts.

The steps are separate so that a test can put them in a wrong order and show that the difference is seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from onekernel.config import Sampling
from onekernel.phases.choose import TokenCounts
from onekernel.phases.choose.draw import draw_many
from onekernel.phases.choose.filters import adjust, keep

DRAWS = 20_000
ALPHA = 1e-6
ORDER = ("mask", "bias", "repetition", "presence", "frequency", "temperature", "top_k", "top_p", "min_p")
GONE = -math.inf


@dataclass(frozen=True)
class Case:
    """Everything a choice depends on except seed and position."""

    logits: Sequence[float]
    sampling: Sampling
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned: frozenset[int] = field(default_factory=frozenset)

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts.start(self.prompt + self.output, len(self.prompt), len(self.logits))

    @property
    def mask(self) -> torch.Tensor:
        return torch.tensor([i not in self.banned for i in range(len(self.logits))])

    def draws(self, seed: int, count: int = DRAWS) -> Counter[int]:
        """Draw with the package at positions 0 to count - 1."""
        scores = adjust(torch.tensor(self.logits), self.sampling, self.counts, self.mask)
        kept = keep(scores, self.sampling)
        parts = [draw_many(kept, seed, part) for part in torch.arange(count).split(500)]  # small enough for one thread
        return Counter(torch.cat(parts).tolist())

    def probabilities(self, order: Sequence[str] = ORDER) -> list[float]:
        """Compute the distribution with the steps in the given order."""
        scores = [float(x) for x in self.logits]
        for step in order:
            scores = getattr(self, f"_{step}")(scores)
        return softmax(scores)

    def _mask(self, scores: list[float]) -> list[float]:
        return [GONE if i in self.banned else s for i, s in enumerate(scores)]

    def _bias(self, scores: list[float]) -> list[float]:
        bias = self.sampling.logit_bias
        return [GONE if bias.get(i, 0) <= -100 else s + bias.get(i, 0) for i, s in enumerate(scores)]

    def _repetition(self, scores: list[float]) -> list[float]:
        penalty, seen = self.sampling.repetition_penalty, {*self.prompt, *self.output}
        return [(s / penalty if s > 0 else s * penalty) if i in seen else s for i, s in enumerate(scores)]

    def _presence(self, scores: list[float]) -> list[float]:
        return [s - self.sampling.presence_penalty * (i in self.output) for i, s in enumerate(scores)]

    def _frequency(self, scores: list[float]) -> list[float]:
        return [s - self.sampling.frequency_penalty * self.output.count(i) for i, s in enumerate(scores)]

    def _temperature(self, scores: list[float]) -> list[float]:
        return [s / self.sampling.temperature for s in scores]

    def _top_k(self, scores: list[float]) -> list[float]:
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return only(scores, ranked[: self.sampling.top_k or None])

    def _top_p(self, scores: list[float]) -> list[float]:
        probabilities, kept, mass = softmax(scores), [], 0.0
        for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
            if mass >= self.sampling.top_p < 1:
                break
            kept.append(i)
            mass += probabilities[i]
        return only(scores, kept)

    def _min_p(self, scores: list[float]) -> list[float]:
        probabilities = softmax(scores)
        limit = self.sampling.min_p * max(probabilities)
        return only(scores, [i for i, p in enumerate(probabilities) if p >= limit])


def only(scores: list[float], kept: Sequence[int]) -> list[float]:
    """Remove every token that is not in `kept`."""
    left = set(kept)
    return [s if i in left else GONE for i, s in enumerate(scores)]


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities of scores, of which some may be -inf."""
    best = max(scores)
    weights = [math.exp(s - best) for s in scores]
    total = sum(weights)
    return [w / total for w in weights]


def p_value(observed: Counter[int], probabilities: Sequence[float]) -> float:
    """Pearson's chi-square test: how likely a deviation at least this large is if the probabilities are right.

    Tokens expected fewer than five times share a cell; a token that can't come but came gives 0.
    """
    total = sum(observed.values())
    if any(probabilities[i] == 0.0 for i in observed):
        return 0.0
    cells = [(observed[i], p * total) for i, p in enumerate(probabilities) if p * total >= 5]
    rare = [(observed[i], p * total) for i, p in enumerate(probabilities) if 0 < p * total < 5]
    if rare:
        cells.append((sum(o for o, _ in rare), sum(e for _, e in rare)))
    return chi_square_tail(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1)


def chi_square_tail(x: float, freedom: int) -> float:
    """P(X > x) of a chi-square variable, by the recurrence in steps of two (Abramowitz and Stegun 26.4.8)."""
    if freedom == 0:
        return 1.0
    tail = math.exp(-x / 2) if freedom % 2 == 0 else math.erfc(math.sqrt(x / 2))
    for k in range(2 if freedom % 2 == 0 else 1, freedom, 2):
        tail += math.exp(k / 2 * math.log(x / 2) - x / 2 - math.lgamma(k / 2 + 1)) if x > 0 else 0.0
    return tail
