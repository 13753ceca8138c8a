"""Which neurons of a ReLU feed-forward are active for which tokens: patterns as inputs and gate weights that make them.

A neuron is active where e + token + neuron > 0: e is a normal deviate that the gate's product itself makes of hidden -
2 random columns, the other two carry the offsets. So a benchmark multiplies real matrices and meets the pattern.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

NEURON_SPREAD = 1.806
"""Deviation of the logarithm of a neuron's rate: the top 10 % of such neurons hold 70 % of the nonzeros."""

TOKEN_SPREAD = 0.25
"""Deviation of a token's offset. At 1 % nonzeros it makes token rates log-normal with a deviation of 0.65: the fullest
of 16,384 tokens has some ten times the mean, as in published models."""

MOST = 0.95
"""The rate of no neuron is above it. From about 5 % nonzeros on it flattens the top of the skewed rates."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Offsets of neurons (inner,) and tokens (tokens,), float32."""

    name: str
    fraction: float
    neurons: torch.Tensor
    tokens: torch.Tensor

    def inputs(self, hidden: int, device: torch.device | str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x (tokens, hidden) and gate (inner, hidden), bf16, whose product has this pattern."""
        draw = torch.Generator(device).manual_seed(seed)
        x = torch.randn(len(self.tokens), hidden, generator=draw, device=device)
        gate = torch.randn(len(self.neurons), hidden, generator=draw, device=device)
        x *= math.sqrt(hidden - 2) / x[:, :-2].norm(dim=1, keepdim=True)  # or long rows would be active more often
        gate /= gate[:, :-2].norm(dim=1, keepdim=True)
        x[:, -2], x[:, -1] = 1.0, self.tokens.to(device)
        gate[:, -2], gate[:, -1] = self.neurons.to(device), 1.0
        return x.bfloat16(), gate.bfloat16()


def iid(fraction: float, tokens: int, inner: int) -> Pattern:
    """Return the pattern in which every neuron is active for a token with the same chance."""
    offset = _quantile(torch.tensor(fraction, dtype=torch.float64)).float()
    return Pattern("iid", fraction, offset.expand(inner), torch.zeros(tokens))


def skew(fraction: float, seed: int, tokens: int, inner: int) -> Pattern:
    """Return the pattern in which rates of neurons and of tokens are log-normal."""
    draw = torch.Generator().manual_seed(seed)
    deviates = _quantile((torch.arange(inner, dtype=torch.float64) + 0.5) / inner)
    rates = torch.exp(NEURON_SPREAD * deviates)
    for _ in range(50):  # what is cut off goes to the others
        rates = (rates * fraction / rates.mean()).clamp(max=MOST)
    offsets = _quantile(rates) * math.sqrt(1 + TOKEN_SPREAD**2)  # so that the mean over tokens is the rate again
    shuffled = offsets[torch.randperm(inner, generator=draw)].float()
    return Pattern("skew", fraction, shuffled, TOKEN_SPREAD * torch.randn(tokens, generator=draw))


def _quantile(probability: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtri(probability)
