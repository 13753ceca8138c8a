"""The matrix product that every phase's reference shares."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from onekernel.phases.norm import rms_norm


class Matrix(Protocol):
    """A matrix that is no tensor and multiplies by itself: ternary or int8, by the reference or by an operator."""

    def linear(self, x: torch.Tensor, /) -> torch.Tensor:
        """Return x @ matrix.T, (tokens, rows) float32, for x (tokens, K) float32."""
        ...

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor:
        """Return the same of x after an RMS norm with `weight` (K,) float32."""
        ...


Weight = torch.Tensor | Matrix


def normed_linear(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rms_norm(x) @ weight.T + bias in float32; see `linear`."""
    if isinstance(weight, torch.Tensor):
        return linear(rms_norm(x, norm, eps), weight, bias)
    product = weight.normed_linear(x, norm, eps)
    return product if bias is None else product + bias.float()


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias in float32.

    x: (tokens, K) float32; weight: (rows, K) bf16 or float32; bias: (rows,). The operands are rounded to the weight's
    dtype, except for several tokens on a CPU: a bf16 product of many rows is about four times slower there than
    expanding the matrix once and multiplying in float32, while for one token the bf16 product reads half the bytes.
    """
    if not isinstance(weight, torch.Tensor):
        product = weight.linear(x)
        return product if bias is None else product + bias.float()
    if weight.dtype is torch.float32:
        return F.linear(x, weight, bias)
    if x.shape[0] > 1 and not weight.is_cuda:
        return F.linear(x, weight.float(), None if bias is None else bias.float())
    return F.linear(x.to(weight.dtype), weight, bias).float()
