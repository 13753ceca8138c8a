"""Dead neurons are brought back by noise on their gates (arXiv 2603.23198).

A neuron that no token activates gets no gradient, so it stays as it is. After each step the gate row of every neuron
that was active for none of the step's tokens moves by a share towards fresh noise, until some token activates it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from onekernel.train.model import SparseLlama

DEVIATION = 0.02
"""Of the noise: that of new weights (`initialise`)."""


@torch.no_grad()
def renoise(model: SparseLlama, counts: Sequence[Tensor], share: float, seed: int, step: int) -> None:
    """Move the gates of neurons that `counts` has no token for: row <- (1 - share) * row + share * noise.

    counts: by layer, (intermediate,) tokens of the step that each neuron was active for, over all processes. The noise
    is a function of seed and step, so that a resumed run has the same; nothing waits for the device.
    """
    draw = torch.Generator(counts[0].device).manual_seed(_seed(seed, step))
    for layer, active in zip(model.layers, counts, strict=True):
        weight = layer.mlp.gate_proj.weight
        noise = torch.empty(weight.shape, dtype=weight.dtype, device=active.device)
        noise.normal_(0.0, DEVIATION, generator=draw)
        rows, dead = _local(weight, weight), _local(active == 0, weight)
        rows.copy_(torch.where(dead[:, None], rows.lerp(_local(noise, weight), share), rows))


def _local(tensor: Tensor, weight: Tensor) -> Tensor:
    """Return this process's rows of a tensor that every process has whole, or of the sharded weight itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if isinstance(weight, DTensor):
        return distribute_tensor(tensor, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
    return tensor


def _seed(seed: int, step: int) -> int:
    """Return a seed that neighbouring steps do not share bits of: a CPU's generator looks at the lowest 32 only."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step}".encode(), digest_size=7).digest())
