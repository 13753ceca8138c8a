"""A down projection that knows how it lies: for hidden_size = intermediate_size no shape could tell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DownProjection:
    """The down projection by neurons: `rows[n]` is added, times neuron n's activation. (intermediate, hidden).

    Sparse kernels read whole rows of it, so it is stored this way; PyTorch's Linear holds the transposed matrix. It is
    made by `from_linear` or `from_rows`, and `sparse_ffn` takes nothing else.
    """

    rows: torch.Tensor

    @classmethod
    def from_linear(cls, weight: torch.Tensor) -> DownProjection:
        """Return it from an nn.Linear's weight, (hidden, intermediate); makes a copy."""
        return cls(weight.t().contiguous())

    @classmethod
    def from_rows(cls, weight: torch.Tensor) -> DownProjection:
        """Return it from a matrix that lies by neurons already, (intermediate, hidden); makes no copy."""
        return cls(weight.contiguous())

    def check(self, up: torch.Tensor) -> None:
        """Raise ConfigError unless it fits an up projection of shape (intermediate, hidden)."""
        if self.rows.shape != up.shape:
            raise ConfigError(
                f"the down projection has {tuple(self.rows.shape)} neurons and outputs where up has "
                f"{tuple(up.shape)} neurons and inputs; from_linear takes (hidden, intermediate), from_rows the other"
            )
