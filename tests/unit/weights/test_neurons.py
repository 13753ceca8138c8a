"""Neurons by rows: nothing is lost, and neighbours are spread."""

from __future__ import annotations

import pytest
import torch

from onekernel.weights.neurons import PackedNeurons, places_of


@pytest.mark.parametrize("places", [1, 4, 8, 61, 64, 1000, 5632, 8192, 14336])
def test_every_neuron_has_a_place_of_its_own(places: int) -> None:
    found = places_of(places, places)
    assert sorted(found.tolist()) == list(range(places))


@pytest.mark.parametrize("ctas", [78, 132, 148])
@pytest.mark.parametrize("step", [1, 2, 8, 64])
def test_neighbours_and_regular_patterns_are_spread_over_ctas(ctas: int, step: int) -> None:
    """Four hot neurons a CTA, `step` apart: none gets more than three times its share."""
    neurons = 8192
    hot = torch.arange(4 * ctas) * step % neurons
    bounds = places_of(neurons, neurons)[hot.unique()] * ctas // neurons
    assert torch.bincount(bounds, minlength=ctas).max() <= 12


@pytest.mark.parametrize(
    ("neurons", "hidden", "places", "width"), [(61, 102, 64, 128), (88, 64, 88, 64), (8, 16, 8, 16)]
)
def test_what_is_packed_comes_back(neurons: int, hidden: int, places: int, width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    up = torch.randn(neurons, hidden, generator=draw).bfloat16()
    down = torch.randn(hidden, neurons, generator=draw).bfloat16()
    packed = PackedNeurons(torch.full((places, 2, width), torch.nan, dtype=torch.bfloat16), neurons, hidden)
    packed.pack(up, down)
    assert torch.equal(packed.up(), up)
    assert torch.equal(packed.down(), down.t())
    assert packed.rows.isfinite().all(), "padding is multiplied too"


def test_an_up_row_lies_in_the_order_of_the_inputs() -> None:
    """Of each 16 values the first two of every four come first; see store_pair of kernels/tile/product.cuh."""
    packed = PackedNeurons(torch.zeros(1, 2, 32, dtype=torch.bfloat16), 1, 32)
    packed.pack(torch.arange(32.0)[None], torch.zeros(32, 1))
    first = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    assert packed.rows[0, 0].tolist() == first + [16 + value for value in first]
