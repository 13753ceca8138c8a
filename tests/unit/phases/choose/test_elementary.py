"""The written-out functions: close to the true values everywhere, and the same bits on every machine."""

from __future__ import annotations

import math

import pytest
import torch

from onekernel.phases.choose.elementary import exp, gumbel, uniform


def true_gumbel(v: torch.Tensor) -> torch.Tensor:
    return -(-torch.log1p(-v.double())).log()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(torch.arange(2**18), id="smallest"),
        pytest.param(2**32 - 1 - torch.arange(2**18), id="largest"),
        pytest.param(torch.arange(2**18) * 2**14 + 77, id="evenly spread"),
        pytest.param(
            (2.0 ** torch.linspace(0, 32, 2**18, dtype=torch.double)).long().clamp(max=2**32 - 1), id="all magnitudes"
        ),
    ],
)
def test_gumbel_is_the_formula_to_a_few_units_in_the_last_place(words: torch.Tensor) -> None:
    v = uniform(words)
    noise = gumbel(v)
    assert noise.dtype == torch.float32 and bool(noise.isfinite().all())
    error = (noise.double() - true_gumbel(v)).abs() / true_gumbel(v).abs().clamp(min=1.0)
    assert float(error.max()) < 5e-7  # 1 ulp is 6e-8 to 1.2e-7


def test_uniform_keeps_full_precision_at_zero_and_stays_below_one() -> None:
    assert uniform(torch.tensor([0, 1, 2])).tolist() == [0.5 * 2**-32, 1.5 * 2**-32, 2.5 * 2**-32]
    assert float(uniform(torch.tensor([2**32 - 1]))) == 1 - 2**-24


def test_the_tail_that_wins_is_fine_grained() -> None:
    noise = gumbel(uniform(torch.arange(1000)))
    assert bool((noise[:-1] > noise[1:]).all())  # neighbouring words differ up to the very end
    assert float(noise[0]) == pytest.approx(33 * math.log(2), rel=1e-6)


def test_same_bits_on_every_machine() -> None:
    words = torch.tensor([0, 1, 12345, 2**30, 2**31, 0x9E3779B9, 0xDEADBEEF, 2**32 - 1])
    assert bits(gumbel(uniform(words))) == [
        *(0x41B6FDA9, 0x41AE33B3, 0x414C2793, 0x3F9F79A2),
        *(0x3EBBA795, 0x3D1CE0FD, 0xBF36631E, 0xC033F049),
    ]
    x = torch.tensor([-0.0, -1e-7, -0.3, -1.0, -2.5, -17.25, -60.0, -87.0])
    assert bits(exp(x)) == [
        *(0x3F800000, 0x3F7FFFFE, 0x3F3DA644, 0x3EBC5AB2),
        *(0x3DA81C2E, 0x330A7A4F, 0x142D70C8, 0x00B33686),
    ]


def bits(x: torch.Tensor) -> list[int]:
    return [b % 2**32 for b in x.view(torch.int32).tolist()]


def test_exp_is_close_and_never_above_one() -> None:
    x = -torch.linspace(0, 87, 200_001)
    error = exp(x).double() / x.double().exp() - 1
    assert float(error.abs().max()) < 3e-7
    assert float(exp(x).max()) == float(exp(torch.zeros(1))) == 1.0
    assert exp(torch.tensor([-87.5, -1e30, -math.inf])).tolist() == [0.0, 0.0, 0.0]
