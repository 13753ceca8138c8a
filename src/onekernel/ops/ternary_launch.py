"""Launch the ternary kernels: which one, in which shape, on which part of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec
from onekernel.kernels.prefill.specs import RESULTS
from onekernel.kernels.ternary.prefill import PrefillShape, choose_prefill, prefill_shapes
from onekernel.kernels.ternary.product import MAX_TOKENS, UNIT_BYTES, ProductShape, choose_product
from onekernel.kernels.ternary.quantise import QuantiseShape
from onekernel.kernels.ternary.wgmma import (
    LEAST_TOKENS,
    ORDER,
    ORDER_SHARED_BYTES,
    ORDER_THREADS,
    WgmmaShape,
    choose_wgmma,
    ordered_columns,
    wgmma_shapes,
)
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles

REPEATED_TOKENS = 2 * MAX_TOKENS
"""Up to here the matrix-vector kernel reads the weights again for the next eight tokens."""

LinearShape = ProductShape | PrefillShape | WgmmaShape

_ALIGN = 16


@dataclass(slots=True)
class TernaryLauncher:
    """The ternary kernels of one device. `load` compiles and loads a spec; each is loaded once, when first needed.

    `wgmma` says that the device has the products of warpgroups: a Hopper GPU, and no other. A first launch compiles,
    which a CUDA graph cannot record: run once before capturing.
    """

    load: Callable[[KernelSpec], Kernel]
    sms: int
    wgmma: bool = False
    _kernels: dict[LinearShape | QuantiseShape | Literal["order"], Kernel] = field(default_factory=dict)

    def linear(
        self,
        q: torch.Tensor,
        inverse: torch.Tensor,
        weight: PackedTernary,
        dtype: torch.dtype,
        shape: LinearShape | None = None,
    ) -> torch.Tensor:
        """Return q @ weight.T / inverse, (tokens, N) in `dtype`, float32 or bf16.

        q is int8 (tokens, K), inverse float32 (tokens,): what q was multiplied by when it was made whole. `shape` takes
        the place of the chosen one.
        """
        tokens, k = q.shape
        strips, strip_bytes = weight.codes.shape
        out = torch.empty(tokens, weight.shape[0], dtype=dtype, device=q.device)
        if tokens == 0:
            return out
        shape = shape or self.choose(weight, tokens, dtype)
        q = _aligned(F.pad(q, (0, -k % _ALIGN)) if k % _ALIGN else q)
        inputs, last, kernel = [q, inverse.contiguous()], [RESULTS["store"]], self.kernel(shape)
        at_once = tokens
        if isinstance(shape, ProductShape):
            last, at_once = [], shape.tokens
        elif isinstance(shape, WgmmaShape):
            ordered, sums = self.order(q)
            inputs = [ordered, inputs[1], sums]
        scales, shared_bytes = weight.scales.view(-1), shape.shared_bytes(-(-strip_bytes // UNIT_BYTES))
        for first in range(0, tokens, at_once):
            part = slice(first, first + at_once)
            taken, count = [values[part] for values in inputs], len(out[part])
            sizes = [strip_bytes, weight.shape[0], count, inputs[0].shape[1]]
            args: list[Arg] = [weight.codes, scales, *taken, out[part], *sizes, *last]
            kernel.launch(shape.grid(strips, count), shape.threads, args, shared_bytes=shared_bytes)
        return out

    def order(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 values (tokens, K) in the order of the codes, (tokens, whole units), and their sums (tokens,)."""
        tokens, k = q.shape
        ordered = torch.empty(tokens, ordered_columns(k), dtype=torch.int8, device=q.device)
        sums = torch.empty(tokens, dtype=torch.int32, device=q.device)
        args: list[Arg] = [q, ordered, sums, k, ordered.shape[1]]
        self.kernel("order").launch(tokens, ORDER_THREADS, args, shared_bytes=ORDER_SHARED_BYTES)
        return ordered, sums

    def quantise(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (q, inverse) as `ternary_cpu.quantise` does; x float32 or bf16 (tokens, K)."""
        tokens, k = x.shape
        q = torch.empty(tokens, k, dtype=torch.int8, device=x.device)
        inverse = torch.empty(tokens, dtype=torch.float32, device=x.device)
        if tokens:
            shape = QuantiseShape(x.dtype is torch.bfloat16, weight is not None)
            norm = inverse if weight is None else _aligned(weight)
            args: list[Arg] = [_aligned(x), norm, q, inverse, inverse.view(torch.int32), k, k, eps]
            self.kernel(shape).launch(tokens, shape.threads, args, shared_bytes=shape.shared_bytes)
        return q, inverse

    def choose(self, weight: PackedTernary, tokens: int, dtype: torch.dtype) -> LinearShape:
        """Return what is launched for that many tokens."""
        strips, strip_bytes = weight.codes.shape
        group, bf16 = weight.group or 0, dtype is torch.bfloat16
        if isinstance(weight, TensorCoreTiles) and tokens > REPEATED_TOKENS:
            if self.wgmma and not group and tokens >= LEAST_TOKENS:
                return choose_wgmma(strips, tokens, bf16=bf16, sms=self.sms)
            return choose_prefill(strips, tokens, group=group, bf16=bf16, sms=self.sms)
        units, held = -(-strip_bytes // UNIT_BYTES), min(tokens, MAX_TOKENS)
        return choose_product(weight.LAYOUT, strips, units, held, group=group, bf16=bf16, sms=self.sms)

    def load_all(self, weight: PackedTernary, dtype: torch.dtype) -> None:
        """Load what any number of tokens may take, and the quantisation of activations in `dtype`."""
        for tokens in range(1, MAX_TOKENS + 1):
            self.kernel(self.choose(weight, tokens, dtype))
        if isinstance(weight, TensorCoreTiles):
            shapes: list[LinearShape] = [*prefill_shapes(weight.group or 0, dtype is torch.bfloat16)]
            if self.wgmma and weight.group is None:
                shapes += wgmma_shapes(dtype is torch.bfloat16)
                self.kernel("order")
            for shape in shapes:
                self.kernel(shape)
        for norm in (False, True):
            self.kernel(QuantiseShape(dtype is torch.bfloat16, norm))

    def kernel(self, shape: LinearShape | QuantiseShape | Literal["order"]) -> Kernel:
        """Return the loaded kernel of a shape."""
        found = self._kernels.get(shape)
        if found is None:
            found = self._kernels[shape] = self.load(ORDER if shape == "order" else shape.spec())
        return found


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous values at an address that vector loads take; a view into the middle of a tensor is copied."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGN else x
