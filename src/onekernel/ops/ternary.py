"""Products with ternary weights as operators of PyTorch: on a GPU by our kernels, on a CPU with the same bits.

Both operators have fakes, so they may stand in what torch.compile takes whole; once their kernels are loaded, which the
first call does, a CUDA graph may record them. They have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from onekernel.device.cuda_kernel import load_operator
from onekernel.device.facts import facts
from onekernel.errors import ConfigError
from onekernel.ops import ternary_cpu
from onekernel.ops.ternary_launch import TernaryLauncher
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles

LAYOUTS: dict[str, type[PackedTernary]] = {layout.LAYOUT: layout for layout in (TensorCoreTiles, Blocks16x32)}
RESULTS = (torch.float32, torch.bfloat16)
"""Dtypes that a product is stored in."""


def ternary_linear(
    x_q: torch.Tensor, x_scale: torch.Tensor, weight: PackedTernary, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return x_q @ weight.T / x_scale in `dtype`, float32 or bf16: (..., N) for int8 x_q (..., K).

    x_scale, (...) float32, is what each token was multiplied by when it was quantised. The sums are exact integers;
    each result is then rounded as onekernel/phases/ternary.py says, with the same bits on every device and for every
    number of tokens. Raises ConfigError for shapes or dtypes that do not fit.
    """
    n, k = weight.shape
    if x_q.dtype is not torch.int8 or x_q.shape[-1:] != (k,):
        raise ConfigError(f"x_q is {x_q.dtype} {tuple(x_q.shape)}; a {n} x {k} matrix takes int8 (..., {k})")
    if x_scale.dtype is not torch.float32 or x_scale.shape != x_q.shape[:-1]:
        raise ConfigError(
            f"x_scale is {x_scale.dtype} {tuple(x_scale.shape)}; it must be float32 {tuple(x_q.shape[:-1])}"
        )
    if dtype not in RESULTS:
        raise ConfigError(f"dtype is {dtype}; a product is stored as float32 or bfloat16")
    shape = [n, k, weight.group or 0]
    flat: torch.Tensor = linear(
        x_q.reshape(-1, k), x_scale.reshape(-1), weight.codes, weight.scales, shape, weight.LAYOUT, dtype
    )
    return flat.view(*x_q.shape[:-1], n)


def quantize_activation(
    x: torch.Tensor, norm: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x_q, x_scale): int8 (..., K) near y * x_scale, half to even; x_scale (...) is 127 / max(max|y|, 1e-5).

    y is x, or with the weights `norm` (K,) its root-mean-square norm x / sqrt(mean(x^2) + eps) * norm. x is float32,
    where the root is only in x_scale, as onekernel/phases/ternary.py says, or bf16, which also rounds the normalised
    value and its product with the weights, as models in bf16 do; another float dtype is taken to float32. Raises
    ConfigError for no values, or weights of another length.
    """
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ConfigError(f"x has shape {tuple(x.shape)}; activations are (..., K) with K of 1 or more")
    k = x.shape[-1]
    if norm is not None and norm.shape != (k,):
        raise ConfigError(f"the norm has weights of shape {tuple(norm.shape)}; activations of {k} values need ({k},)")
    if x.dtype not in RESULTS:
        x = x.float()
    q, inverse = quantise(x.reshape(-1, k), None if norm is None else norm.float(), eps)
    return q.view(x.shape), inverse.view(x.shape[:-1])


def load_kernels(weight: PackedTernary, dtype: torch.dtype = torch.float32) -> None:
    """Load all kernels for a matrix on a GPU and activations and results in `dtype`, so that none is compiled later."""
    if weight.codes.is_cuda:
        with torch.cuda.device(weight.codes.device):
            _launcher(weight.codes.device.index).load_all(weight, dtype)


@torch.library.custom_op("onekernel::ternary_linear", mutates_args=(), device_types="cpu")
def linear(
    q: torch.Tensor,
    inverse: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do `ternary_linear` on the buffers of a packed matrix: shape is (N, K, group or 0); q (tokens, K)."""
    return ternary_cpu.linear(q, inverse, _packed(codes, scales, shape, layout)).to(dtype)


@linear.register_kernel("cuda")
def _(
    q: torch.Tensor,
    inverse: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    with torch.cuda.device(q.device):
        return _launcher(q.device.index).linear(q, inverse, _packed(codes, scales, shape, layout), dtype)


@linear.register_fake
def _(
    q: torch.Tensor,
    inverse: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], shape[0], dtype=dtype)


@torch.library.custom_op("onekernel::quantize_activation", mutates_args=(), device_types="cpu")
def quantise(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `quantize_activation` on x (tokens, K) float32 or bf16 and float32 weights."""
    return ternary_cpu.quantise(x, weight, eps)


@quantise.register_kernel("cuda")
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cuda.device(x.device):
        return _launcher(x.device.index).quantise(x, weight, eps)


@quantise.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@cache
def _launcher(index: int) -> TernaryLauncher:
    device = f"cuda:{index}"
    found = facts(device)
    return TernaryLauncher(partial(load_operator, device=device), found.sm_count, found.capability == (9, 0))


def _packed(codes: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], layout: str) -> PackedTernary:
    n, k, group = shape
    return LAYOUTS[layout](codes, scales, (n, k), (), group or None)
