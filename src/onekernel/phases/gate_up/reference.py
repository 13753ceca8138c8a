"""Reference of the gate_up phase."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from onekernel.phases.linear import Weight, normed_linear


def activate(gate: torch.Tensor, kind: Literal["silu", "relu", "relu2"]) -> torch.Tensor:
    """Apply SiLU, ReLU or squared ReLU."""
    if kind == "silu":
        return F.silu(gate)
    return F.relu(gate) if kind == "relu" else F.relu(gate).square()


def gate_up(
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor | None,
    hidden_act: Literal["silu", "relu", "relu2"],
) -> torch.Tensor:
    """Return activate(gate) * up, (tokens, intermediate_size) float32.

    weight: rows of gate, then rows of up, (2 * intermediate_size, hidden_size).
    """
    gate, up = normed_linear(residual, norm, eps, weight, bias).chunk(2, dim=-1)
    return activate(gate, hidden_act) * up
