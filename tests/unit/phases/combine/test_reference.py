"""Merged parts of a split softmax equal the softmax of the whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from onekernel.phases.combine.reference import combine


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.floats(0.1, 60.0), st.integers(0, 2**31))
def test_any_split_gives_plain_softmax_attention(lengths: list[int], spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, head_dim, tokens = 3, 8, sum(lengths)
    scores = torch.randn(heads, tokens, generator=generator, dtype=torch.float64) * spread
    values = torch.randn(tokens, head_dim, generator=generator, dtype=torch.float64)
    sums, maxima, weights = [], [], []
    for part, part_values in zip(scores.split(lengths, dim=1), values.split(lengths), strict=True):
        maxima.append(part.amax(dim=1))
        shares = torch.exp(part - maxima[-1][:, None])
        weights.append(shares.sum(dim=1))
        sums.append(shares @ part_values)
    merged = combine(torch.stack(sums), torch.stack(maxima), torch.stack(weights))
    torch.testing.assert_close(merged, torch.softmax(scores, dim=1) @ values)


def test_a_part_far_below_the_others_adds_nothing_and_no_nan() -> None:
    sums = torch.tensor([[[2.0, 4.0]], [[1e3, 1e3]]])
    merged = combine(sums, torch.tensor([[0.0], [-1e30]]), torch.tensor([[2.0], [1.0]]))
    assert torch.equal(merged, torch.tensor([[1.0, 2.0]]))
