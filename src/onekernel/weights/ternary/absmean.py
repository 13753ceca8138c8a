"""From trained master weights to codes and scales: the quantiser that BitNet b1.58 trains with."""

from __future__ import annotations

import torch

from onekernel.errors import ConfigError
from onekernel.weights.ternary.matrix import TernaryMatrix

SMALLEST_SCALE = 1e-5
"""Lower bound of a scale, as in the models' own code."""


def quantise(weight: torch.Tensor, group: int | None = None) -> TernaryMatrix:
    """Return the ternary form of a master weight (N, K) of any float dtype, with one scale, or one for each `group`.

    scale = max(mean |w|, 1e-5), code = clamp(round(w * (1 / scale)), -1, 1), half to even, in float32 (Ma et al.,
    2024, "The Era of 1-bit LLMs"). Where all values are 0 and plus or minus one number already, as in a model that was
    expanded from ternary weights, that number is the scale and nothing is lost; where all are 0 it is 1e-5. Raises
    ConfigError for an empty weight, or columns that are no whole groups.
    """
    if weight.dim() != 2 or weight.numel() == 0 or (group is not None and weight.shape[1] % group):
        groups = "" if group is None else f" and K a multiple of {group}"
        raise ConfigError(f"a master weight has shape {tuple(weight.shape)}; it must be (N, K), not empty{groups}")
    values = weight.float()
    runs = values.reshape(1, -1) if group is None else values.view(-1, group)
    sizes = runs.abs()
    largest = sizes.amax(dim=1, keepdim=True)
    is_ternary = ((sizes == 0) | (sizes == largest)).all(dim=1, keepdim=True)
    scales = sizes.mean(dim=1, keepdim=True).clamp(min=SMALLEST_SCALE)
    codes = (runs * (1 / scales)).round_().clamp_(-1, 1)
    if bool(is_ternary.any()):
        codes = torch.where(is_ternary, runs.sign(), codes)
    codes = codes.to(torch.int8)
    scales = torch.where(is_ternary & (largest > 0), largest, scales)
    by_group = None if group is None else scales.view(weight.shape[0], -1)
    return TernaryMatrix(codes.view(weight.shape), scales.view(-1) if by_group is None else by_group, group=group)
