"""A linear layer with packed ternary weights, and the exchange of a transformers model's layers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onekernel.errors import ConfigError
from onekernel.ops.ternary import RESULTS, linear, quantize_activation
from onekernel.weights.ternary import hf_packed
from onekernel.weights.ternary.absmean import quantise
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles


class TernaryLinear(nn.Module):
    """y = quantised(x) @ weight.T + bias: x (..., K) of any float dtype, y (..., N) in that dtype.

    With `norm`, weights (K,), x first goes through a root-mean-square norm, in one kernel with the quantisation. The
    scales stay float32 whatever dtype the module is taken to. Not for training.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor | None

    def __init__(
        self,
        weight: PackedTernary,
        bias: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group, self.layout, self.eps = weight.group, weight.LAYOUT, eps
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("bias", bias)
        self.register_buffer("norm", norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, rounded once to x's dtype before the bias is added.

        Raises ConfigError for x of another width than in_features.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ConfigError(f"x has shape {tuple(x.shape)}; this layer takes (..., {self.in_features})")
        q, inverse = quantize_activation(x, self.norm, self.eps)
        shape = [self.out_features, self.in_features, self.group or 0]
        dtype = x.dtype if x.dtype in RESULTS else torch.float32
        flat: torch.Tensor = linear(
            q.view(-1, self.in_features), inverse.view(-1), self.codes, self.scales, shape, self.layout, dtype
        )
        y: torch.Tensor = flat.view(*x.shape[:-1], self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return what PyTorch prints in the parentheses."""
        group = f", group={self.group}" if self.group else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, layout={self.layout}{group}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TernaryLinear:
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.scales.device)  # moved, but not rounded by a .to(dtype)
        return self


def replace_linears(
    model: nn.Module,
    *,
    masters: bool = False,
    keep: tuple[str, ...] = ("lm_head",),
    layout: type[PackedTernary] = TensorCoreTiles,
) -> list[str]:
    """Put a `TernaryLinear` in the place of every ternary linear layer of a model, and return their names.

    Ternary are transformers' BitLinear and AutoBitLinear, by their own conventions of scales, and an nn.Linear whose
    weights are all 0 and plus or minus one number. With `masters` every nn.Linear is: its weights are then quantised by
    their mean absolute value, which spoils a model that was not trained so. A layer is left alone if the last part of
    its name is in `keep` or it has no weights; one of several names stays one. Raises ConfigError if none is ternary.
    """
    made: dict[nn.Module, TernaryLinear | None] = {}
    found: dict[str, TernaryLinear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not name or name.rpartition(".")[2] in keep:
            continue
        if module not in made:
            made[module] = _replacement(name, module, masters, layout)
        if (layer := made[module]) is not None:
            found[name] = layer
    if not found:
        raise ConfigError(
            "no linear layer of the model is ternary, or all are packed already; if its weights are the masters of a "
            "ternary model, which are quantised now, say masters=True"
        )
    for name, layer in found.items():
        model.set_submodule(name, layer)
    return list(found)


def _replacement(name: str, module: Any, masters: bool, layout: type[PackedTernary]) -> TernaryLinear | None:
    kind = type(module).__name__
    if kind == "BitLinear":
        codes = hf_packed.unpack(module.weight, module.out_features, name)
        matrix = TernaryMatrix(codes, 1 / module.weight_scale.float().view(1))
    elif kind == "AutoBitLinear" and not module.online_quant:
        matrix = TernaryMatrix(module.weight.detach().to(torch.int8), module.weight_scale.float().view(1))
    elif not isinstance(module, nn.Linear) or module.weight.numel() == 0:
        return None
    elif masters or kind == "AutoBitLinear" or _is_ternary(module.weight):
        matrix = quantise(module.weight.detach())
    else:
        return None
    norm = getattr(module, "rms_norm", None)
    bias = None if module.bias is None else module.bias.detach()
    if norm is None:
        return TernaryLinear(layout.pack(matrix), bias)
    return TernaryLinear(layout.pack(matrix), bias, norm.weight.detach(), norm.variance_epsilon)


def _is_ternary(weight: torch.Tensor) -> bool:
    sizes = weight.detach().abs()
    return bool(((sizes == 0) | (sizes == sizes.max())).all())
