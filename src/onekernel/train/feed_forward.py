"""The gated feed-forward of a model in training, with what the penalty and the log need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onekernel.config import ModelConfig


class Activity(NamedTuple):
    """What one feed-forward did, each the mean over tokens, float32 scalars on the device."""

    penalty: Tensor
    """Sum over neurons of |h|, with its gradient."""
    nonzeros: Tensor
    """Active neurons."""


@dataclass(slots=True)
class Tally:
    """Counts of one layer over an evaluation; see `FeedForward.tally`."""

    neurons: Tensor
    """(intermediate,) int64: tokens that each neuron was active for."""
    fullest: Tensor
    """Scalar int64: most active neurons of a token."""

    @classmethod
    def zero(cls, intermediate_size: int, device: torch.device) -> Tally:
        """Return a tally of nothing."""
        return cls(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((intermediate_size,), ())))


class FeedForward(nn.Module):
    """down(h), h = activate(gate(x)) * up(x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation = config.hidden_act
        self.tally: Tally | None = None
        """Where an evaluation counts what is active; None: nothing is counted."""

    def forward(self, x: Tensor) -> tuple[Tensor, Activity]:
        """Return the output for x, (batch, tokens, hidden), and what was active."""
        active = activate(self.gate_proj(x), self.activation)
        inner = active * self.up_proj(x)
        on = active != 0
        if self.tally is not None:
            self.tally.neurons += on.flatten(0, -2).sum(0)
            self.tally.fullest = torch.maximum(self.tally.fullest, on.sum(-1).max())
        activity = Activity(inner.float().abs().sum(-1).mean(), on.sum(-1, dtype=torch.float32).mean())
        return self.down_proj(inner), activity


def activate(gate: Tensor, activation: str) -> Tensor:
    """Return relu, relu2 (its square) or silu of the gate."""
    if activation == "silu":
        return F.silu(gate)
    active = F.relu(gate)
    return active.square() if activation == "relu2" else active
