"""Ternary matrices on a GPU: packed once, two bits a weight, multiplied by the operators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onekernel.models.packed import PackedModel
from onekernel.models.packed_weights import PlacePacked, by_reference
from onekernel.models.ternary import Place
from onekernel.ops.ternary import load_kernels, quantize_activation, ternary_linear
from onekernel.phases.ternary import TernaryReference
from onekernel.weights.arena import LAYER_MATRICES
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import STRIP_ROWS, PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles


@dataclass(frozen=True, slots=True)
class OperatorMatrix:
    """A packed matrix as models take it. The results are the reference's, bit by bit; see phases/ternary.py."""

    packed: PackedTernary

    @classmethod
    def pack(cls, matrix: TernaryMatrix) -> OperatorMatrix:
        """Pack for the tensor cores, on the matrix's device; on a GPU every kernel it may need is loaded as well."""
        packed = TensorCoreTiles.pack(matrix)
        load_kernels(packed)
        return cls(packed)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x (tokens, K) float32, quantised to int8: (tokens, N) float32."""
        return ternary_linear(*quantize_activation(x), self.packed)

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the same of the normed x; norm and quantisation are one kernel."""
        return ternary_linear(*quantize_activation(x, weight, eps), self.packed)

    def __getitem__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows, (tokens, K) float32, unpacking only the strips that they are in."""
        packed, count = self.packed, len(token_ids)
        strips = token_ids // STRIP_ROWS
        scales = packed.scales.view(-1, STRIP_ROWS) if packed.group is None else packed.scales
        rows = count * STRIP_ROWS
        part = replace(
            packed,
            codes=packed.codes[strips],
            scales=scales[strips].flatten() if packed.group is None else scales[strips],
            shape=(rows, packed.shape[1]),
            rows=(1,) * rows if packed.group is None else (),
        )
        first = torch.arange(count, device=token_ids.device) * STRIP_ROWS
        return part.unpack().dequantised()[first + token_ids % STRIP_ROWS]


def operators_for(packed: PackedModel) -> PlacePacked:
    """Return what multiplies by a packed model's ternary matrices; on a GPU every kernel it may need is loaded now."""
    place = place_packed_on(str(packed.arena.device))
    if place is OperatorMatrix and packed.config.ternary is not None:
        for kind in LAYER_MATRICES:
            load_kernels(packed.ternary(kind))
    return place


def place_packed_on(device: str) -> PlacePacked:
    """Return what multiplies by packed matrices that lie on a device."""
    return OperatorMatrix if device.startswith("cuda") else by_reference


def place_on(device: str) -> Place:
    """Return how matrices are kept on a device: packed on a GPU, else a byte a code, as PyTorch multiplies them."""
    return OperatorMatrix.pack if device.startswith("cuda") else TernaryReference
