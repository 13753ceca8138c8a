"""The gated feed-forward of a model in training, with what the penalty and the log need."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onekernel.config import ModelConfig
from onekernel.ops.sparse_training import Trained, TrainingRoute, train_ffn


class FeedForward(nn.Module):
    """down(h), h = activate(gate(x)) * up(x). `route` (of ReLU) and `count_neurons` change between steps."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation: Literal["silu", "relu", "relu2"] = config.hidden_act
        self.route = TrainingRoute()
        self.count_neurons = True

    def forward(self, x: Tensor) -> Trained:
        """Return the output for x, (batch, tokens, hidden), its penalty, and what was active."""
        if self.activation == "silu":
            return self._silu(x)
        gate, up, down = (linear.weight for linear in (self.gate_proj, self.up_proj, self.down_proj))
        return train_ffn(
            x, gate, up, down, activation=self.activation, route=self.route, count_neurons=self.count_neurons
        )

    def _silu(self, x: Tensor) -> Trained:
        """Dense training of a baseline: nearly everything is active, and the penalty only shrinks."""
        active = F.silu(self.gate_proj(x))
        inner = active * self.up_proj(x)
        on = (active.detach() != 0).flatten(0, -2)
        penalty = inner.float().abs().sum(-1).mean()
        counts = on.sum(0) if self.count_neurons else None
        return Trained(self.down_proj(inner), penalty, on.sum(1, dtype=torch.int32), counts)
