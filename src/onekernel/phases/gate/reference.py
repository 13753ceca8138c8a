"""Reference of the gate phase: which neurons fire, and what each of them comes to."""

from __future__ import annotations

from typing import Literal

import torch

from onekernel.phases.gate_up.reference import activate
from onekernel.phases.norm import rms_norm


def gate(
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    hidden_act: Literal["relu", "relu2"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the neurons that fire for one token, int64 (n,), and what their down rows are multiplied by, float32 (n,).

    residual: (1, hidden_size) float32; gate_up: (2 * intermediate_size, hidden_size). Up rows of neurons whose gate is
    not above zero are not read. Factors, activate(x . gate[n]) * (x . up[n]), are rounded to the weights' dtype, as
    between the phases of a dense feed-forward.
    """
    x = rms_norm(residual, norm, eps).to(gate_up.dtype).float()[0]
    gates, ups = gate_up.chunk(2)
    values = gates.float() @ x
    neurons = (~(values <= 0)).nonzero()[:, 0]  # NaN must not vanish
    inner = activate(values[neurons], hidden_act) * (ups[neurons].float() @ x)
    return neurons, inner.to(gate_up.dtype).float()
