"""Up and down projections by neurons: what a token reads of those that fire, each in one piece."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_GOLDEN = (math.sqrt(5) - 1) / 2


def places_of(neurons: int, places: int) -> torch.Tensor:
    """Return where each neuron lies among `places` places, int64 (neurons,).

    Whole steps of about the golden section: any run of neighbours, and any regular pattern of them, is spread evenly
    over the places, and so over CTAs, however many share them (three-distance theorem; Sos, 1958). Neurons that fire
    often, wherever they stand, therefore burden no single CTA.
    """
    step = max(1, round(places * _GOLDEN))
    while math.gcd(step, places) > 1:
        step += 1
    return torch.arange(neurons) * step % places


@dataclass(frozen=True, slots=True)
class PackedNeurons:
    """`rows` bf16 (places, 2, width): a neuron's up row, then its down row, padded with zeros.

    A neuron that fires is one run of bytes. An up row lies in the order in which the megakernel keeps its inputs in
    shared memory (`store_pair` of kernels/tile/product.cuh): of each 16 values the first two of every four, then the
    others, so that a lane finds row and inputs in 16 consecutive bytes each. A down row has its own order.
    """

    rows: torch.Tensor
    neurons: int
    hidden: int

    def pack(self, up: torch.Tensor, down: torch.Tensor) -> None:
        """Fill the rows from up (neurons, hidden) and down (hidden, neurons), rounded to bf16."""
        places = self._places
        self.rows.zero_()
        padded = torch.nn.functional.pad(up.to(self.rows.dtype), (0, self.rows.shape[2] - self.hidden))
        self.rows[places, 0] = padded.view(self.neurons, -1, 4, 2, 2).transpose(2, 3).flatten(1)
        self.rows[places, 1, : self.hidden] = down.t().to(self.rows.dtype)

    def up(self) -> torch.Tensor:
        """Return a copy of the up projection, (neurons, hidden)."""
        in_order = self.rows[self._places, 0].view(self.neurons, -1, 2, 4, 2).transpose(2, 3)
        return in_order.reshape(self.neurons, -1)[:, : self.hidden]

    def down(self) -> torch.Tensor:
        """Return a copy of the down projection by neurons, (neurons, hidden)."""
        return self.rows[self._places, 1, : self.hidden]

    @property
    def _places(self) -> torch.Tensor:
        return places_of(self.neurons, self.rows.shape[0]).to(self.rows.device)
