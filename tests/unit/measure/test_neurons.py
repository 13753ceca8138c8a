"""Counts of active neurons, whatever the parts in which values come."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onekernel.measure.neurons import active_neurons


@given(part=st.integers(1, 9), seed=st.integers(0, 99))
def test_parts_do_not_matter(part: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    layers = torch.randn(2, 9, 20, generator=draw).relu() * (torch.rand(2, 1, 20, generator=draw) > 0.3)
    parts = ((layer, values) for piece in layers.split(part, dim=1) for layer, values in enumerate(piece))
    found = active_neurons(parts)
    for layer, values in zip(found, layers, strict=True):
        by_token = (values > 0).sum(1)
        assert layer.mean == float(by_token.double().mean())
        assert layer.most == int(by_token.max())
        assert layer.never == int((values.sum(0) == 0).sum())
        assert layer.percent == 100 * layer.mean / 20


def test_what_is_not_a_number_counts_as_active() -> None:
    (layer,) = active_neurons([(3, torch.tensor([[0.0, float("nan"), -1.0, -0.0]]))])
    assert (layer.layer, layer.mean, layer.never) == (3, 2.0, 2)
