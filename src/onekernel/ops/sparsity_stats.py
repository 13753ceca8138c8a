"""How sparse the feed-forwards of a model in training are, counted on the device and read now and then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onekernel.errors import ConfigError

_SUMS = 3
_ROWS, _NONZEROS, _FULLEST = range(_SUMS)


@dataclass(frozen=True, slots=True)
class LayerSparsity:
    """One layer over the tokens since the last reading."""

    tokens: int
    mean: float
    """Active neurons of a token."""
    fullest: int
    """Active neurons of the fullest token."""
    neuron_counts: Tensor
    """(neurons,) int64 on the CPU: tokens that each neuron was active for, of those whose neurons were counted."""

    @property
    def nonzero_fraction(self) -> float:
        """Active neurons of a token, of all: 0 to 1."""
        return self.mean / len(self.neuron_counts)

    @property
    def dead(self) -> int:
        """Neurons that were active for none of the counted tokens; all of them where none was counted."""
        return int((self.neuron_counts == 0).sum())


@dataclass(frozen=True, slots=True)
class Sparsity:
    """All layers, in order; the properties are over all of them. No row can overflow: a bit mask has room for all."""

    layers: tuple[LayerSparsity, ...]

    @property
    def mean(self) -> float:
        """Active neurons of a token and layer."""
        return sum(layer.mean for layer in self.layers) / len(self.layers)

    @property
    def fullest(self) -> int:
        """Active neurons of the fullest token in any layer."""
        return max(layer.fullest for layer in self.layers)

    @property
    def dead(self) -> int:
        """Neurons of all layers that were never active."""
        return sum(layer.dead for layer in self.layers)

    @property
    def nonzero_fraction(self) -> float:
        """Active neurons of all, 0 to 1."""
        return sum(layer.nonzero_fraction for layer in self.layers) / len(self.layers)


class SparsityStats:
    """Counters of every layer on one device. `observe` only adds there; `read` waits for the device, once.

    A forward that is made twice for activation checkpointing counts its tokens twice, which changes no mean.
    """

    def __init__(self, layers: int, neurons: int, device: torch.device | str) -> None:
        if layers < 1 or neurons < 1:
            raise ConfigError(f"{layers} layers of {neurons} neurons; both must be 1 or more")
        self._counters = torch.zeros(layers, _SUMS + neurons, dtype=torch.int64, device=device)

    def observe(self, layer: int, row_counts: Tensor, neuron_counts: Tensor | None) -> None:
        """Add what one call of one layer counted: active by token, (tokens,), and tokens by neuron if it did."""
        if row_counts.numel() == 0:
            return
        counters = self._counters[layer]
        counters[_ROWS] += row_counts.numel()
        counters[_NONZEROS] += row_counts.sum()
        counters[_FULLEST] = torch.maximum(counters[_FULLEST], row_counts.max())
        if neuron_counts is not None:
            counters[_SUMS:] += neuron_counts

    def read(self) -> Sparsity:
        """Return what was seen since the last reading, and begin anew."""
        found = self._counters.to("cpu", copy=True)
        self._counters.zero_()
        return Sparsity(
            tuple(
                LayerSparsity(rows, nonzeros / max(rows, 1), fullest, counts[_SUMS:])
                for counts in found
                for rows, nonzeros, fullest in [counts[:_SUMS].tolist()]
            )
        )
