"""The parts of the rounding contract, each against exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onekernel.phases.ternary import Int8Rows, TernaryReference, integer_sums, quantise_activations
from onekernel.weights.ternary.activations import root_mean_square
from onekernel.weights.ternary.int8_rows import quantise_rows
from onekernel.weights.ternary.matrix import TernaryMatrix


@given(st.integers(1, 5), st.integers(1, 70), st.integers(1, 300), st.integers(0, 2**31))
def test_sums_are_exact(tokens: int, rows: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (tokens, columns), generator=draw, dtype=torch.int8)
    codes = torch.randint(-1, 2, (rows, columns), generator=draw, dtype=torch.int8)
    assert torch.equal(integer_sums(q, codes).long(), q.long() @ codes.long().T)


def test_sums_are_exact_where_they_are_largest() -> None:
    q = torch.full((2, 1 << 17), -128, dtype=torch.int8)
    codes = torch.ones(3, 1 << 17, dtype=torch.int8)
    assert integer_sums(q, codes).tolist() == [[-128 << 17] * 3] * 2


def test_activations_round_half_to_even_and_the_largest_becomes_127() -> None:
    q, inverse = quantise_activations(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.4, -127.0]]))
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -126, -127]]
    assert inverse.item() == 1.0
    q, inverse = quantise_activations(torch.zeros(1, 4))
    assert q.tolist() == [[0] * 4]
    assert inverse.item() == pytest.approx(127e5)


def test_a_value_that_is_no_number_is_not_lost() -> None:
    matrix = TernaryReference(TernaryMatrix(torch.ones(2, 3, dtype=torch.int8), torch.ones(1)))
    for bad in (float("nan"), float("inf")):
        assert not matrix.linear(torch.tensor([[1.0, bad, 2.0]])).isfinite().any()


@pytest.mark.parametrize("k", [1, 3, 128, 1000, 2560, 4097, 20480])
def test_the_root_is_that_of_float64_but_for_a_few_roundings(k: int) -> None:
    x = torch.randn(8, k, generator=torch.Generator().manual_seed(0)) * 1e3
    exact = (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert ((root_mean_square(x, 1e-5) - exact).abs() < 3e-7 * exact).all()


def test_the_root_is_the_nearest_float() -> None:
    """As on a GPU. PyTorch's root of float32 on a CPU is not where there are many tokens."""
    x = torch.arange(1, 4001, dtype=torch.float32)[:, None]
    assert torch.equal(root_mean_square(x, 0.5), torch.from_numpy(np.sqrt(x.square().numpy() + np.float32(0.5))))


def test_a_sum_of_squares_has_the_stated_order() -> None:
    """Value by value; with numbers of very different sizes hardly any other order has the same bits."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 9000, generator=draw) * torch.exp(3 * torch.randn(1, 9000, generator=draw))
    squares = np.zeros(18 * 512, np.float32)
    squares[:9000] = x[0].square().numpy()

    def in_halves(values: list[np.float32]) -> np.float32:
        while len(values) > 1:
            half = len(values) // 2
            values = [values[i] + values[i + half] for i in range(half)]
        return values[0]

    fours = [in_halves(list(squares[i : i + 4])) for i in range(0, len(squares), 4)]
    sums = fours[:128]
    for first in range(128, len(fours), 128):
        sums = [one + other for one, other in zip(sums, fours[first : first + 128], strict=True)]
    total = in_halves([in_halves(sums[i : i + 4]) for i in range(0, 128, 4)])
    assert root_mean_square(x, 1e-5).item() == np.sqrt(total * np.float32(1 / 9000) + np.float32(1e-5))


def test_a_normed_product_is_that_of_float64_but_for_what_int8_rounds() -> None:
    """Also of values so small that only the norm makes them more than nothing."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, 1000, generator=draw) * torch.tensor([1e-7, 1e-3, 1, 30, 1e6])[:, None]
    weight = 1 + 0.3 * torch.randn(1000, generator=draw)
    codes = torch.randint(-1, 2, (200, 1000), generator=draw, dtype=torch.int8)
    values, scales = quantise_rows(torch.randn(200, 1000, generator=draw))
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for matrix, exact, bound in (
        (TernaryReference(TernaryMatrix(codes, torch.ones(1))), normed @ codes.double().T, 2e-2),
        (Int8Rows(values, scales), normed @ (values.double() * scales[:, None]).T, 1e-4),
    ):
        got = matrix.normed_linear(x, weight, 1e-5)
        assert ((got - exact).norm(dim=1) < bound * exact.norm(dim=1)).all()


def test_an_int8_head_rounds_weights_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, 512, generator=draw), torch.randn(6, 512, generator=draw)
    values, scales = quantise_rows(weight)
    exact = x.double() @ (values.double() * scales[:, None]).T
    got = Int8Rows(values, scales).linear(x)
    assert (got - exact).norm() < 3e-5 * exact.norm()
    assert (exact - x.double() @ weight.double().T).norm() > 3e-3 * exact.norm()
