"""Which tokens top-k, top-p and min-p keep, above all at ties and edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onekernel.phases.choose.elementary import exp
from onekernel.phases.choose.filters import Kept, min_p, top_k, top_p

COARSE = st.lists(st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5]), max_size=30).map(lambda tail: [1.0, *tail])
"""Scores with many ties and removed tokens; at least one is not removed."""


def kept(scores: list[float] | torch.Tensor) -> Kept:
    scores = torch.as_tensor(scores)
    return Kept(torch.arange(len(scores)), scores)


def by_score(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


@settings(max_examples=200, deadline=None)
@given(COARSE, st.integers(0, 35))
def test_top_k_keeps_exactly_k_and_of_ties_the_lowest_ids(scores: list[float], k: int) -> None:
    assert top_k(kept(scores), k).token_ids.tolist() == sorted(by_score(scores)[: k or None])


@settings(max_examples=200, deadline=None)
@given(COARSE, st.floats(1e-6, 1.0, exclude_max=True))
def test_top_p_keeps_the_shortest_run_that_reaches_p(scores: list[float], p: float) -> None:
    token_ids = top_p(kept(scores), p).token_ids.tolist()
    order = by_score(scores)[: len(token_ids)]
    assert token_ids == sorted(order)
    total = sum(math.exp(s) for s in scores)
    mass = [math.exp(scores[i]) / total for i in order]
    assert sum(mass[:-1]) < p + 1e-6 and sum(mass) > p - 1e-6


def test_top_p_keeps_the_token_that_crosses_and_stops_at_equality() -> None:
    halves = [math.log(w) for w in (1, 2, 4, 1)]  # probabilities 1/8, 1/4, 1/2, 1/8
    for p, expected in [(1e-30, [2]), (0.5, [2]), (0.51, [1, 2]), (0.76, [0, 1, 2]), (0.99, [0, 1, 2, 3])]:
        assert top_p(kept(halves), p).token_ids.tolist() == expected
    for p, expected in [(0.25, [0]), (0.5, [0, 1]), (0.75, [0, 1, 2]), (0.7501, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])]:
        assert top_p(kept([2.0] * 4), p).token_ids.tolist() == expected


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 0.99, 0.99999])
def test_top_p_without_its_shortcut(spread: float, p: float) -> None:
    scores = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * spread
    weights = (exp(scores - scores.max()) * 2.0**40).long()
    order = scores.sort(descending=True, stable=True).indices
    before = weights[order].cumsum(0) - weights[order]
    expected = order[before < math.ceil(p * int(weights.sum()))].sort().values
    assert torch.equal(top_p(kept(scores), p).token_ids, expected)


def test_min_p_is_relative_to_the_likeliest() -> None:
    scores = [math.log(w) for w in (8, 4, 2, 1)]
    for p, expected in [(0.0, 4), (0.12, 4), (0.13, 3), (0.26, 2), (0.51, 1), (1.0, 1)]:
        assert len(min_p(kept(scores), p).token_ids) == expected
    assert min_p(kept([3.0, 1.0, 3.0]), 1.0).token_ids.tolist() == [0, 2]
    assert min_p(kept([0.0, -math.inf]), 1e-30).token_ids.tolist() == [0]


def test_filters_start_from_what_is_kept() -> None:
    some = Kept(torch.tensor([3, 10, 70, 71]), torch.tensor([0.0, 2.0, 1.0, 1.0]))
    assert top_k(some, 2).token_ids.tolist() == [10, 70]
    assert top_p(some, 0.7).token_ids.tolist() == [10, 70]
    assert min_p(some, 0.3).token_ids.tolist() == [10, 70, 71]
