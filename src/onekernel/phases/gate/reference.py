"""Reference of the gate phase: what each share of the neurons adds to the residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from onekernel.phases.gate_up.reference import activate
from onekernel.phases.norm import rms_norm


def gate(
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden_act: Literal["relu", "relu2"],
    shares: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the sums of shares of the neurons, float32 (shares, hidden_size), for one token.

    residual: (1, hidden_size) float32; gate_up: (2 * intermediate_size, hidden_size); down: (hidden_size,
    intermediate_size); shares: neurons in the order in which they are added up. Neurons whose gate is not above zero
    are not read: y = sum of activate(x . gate[n]) * (x . up[n]) * down[n] over the others. The factor of a down row is
    rounded to the weights' dtype, as between the phases of a dense feed-forward.
    """
    x = rms_norm(residual, norm, eps).to(down.dtype).float()[0]
    gates, ups = gate_up.chunk(2)
    sums = torch.zeros(len(shares), len(down), device=down.device)
    for total, neurons in zip(sums, shares, strict=True):
        values = gates[neurons].float() @ x
        fires = ~(values <= 0)  # NaN must not vanish
        active = neurons[fires]
        inner = activate(values[fires], hidden_act) * (ups[active].float() @ x)
        for value, neuron in zip(inner.to(down.dtype).float(), active, strict=True):
            total += value * down[:, neuron].float()
    return sums
