"""Learning rate and L1 coefficient over the steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from onekernel.train.schedule import l1_coefficient, learning_rate
from onekernel.train.settings import OptimizerSettings, SparsitySettings


def test_the_rate_rises_and_falls() -> None:
    given = OptimizerSettings(learning_rate=1.0, warm_up=10, decay="cosine", final_share=0.1)
    rates = [learning_rate(step, 110, given) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert all(before >= after for before, after in pairwise(rates[10:]))
    assert learning_rate(110, 110, given) == pytest.approx(0.1)


def test_linear_and_constant() -> None:
    linear = OptimizerSettings(learning_rate=2.0, warm_up=0, decay="linear")
    assert [learning_rate(step, 4, linear) for step in range(5)] == [2.0, 1.5, 1.0, 0.5, 0.0]
    constant = OptimizerSettings(learning_rate=2.0, warm_up=2, decay="constant")
    assert [learning_rate(step, 4, constant) for step in range(4)] == [1.0, 2.0, 2.0, 2.0]


def test_the_coefficient_rises_and_stays() -> None:
    given = SparsitySettings(l1=4.0, l1_warm_up=4)
    assert [l1_coefficient(step, given) for step in range(6)] == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert l1_coefficient(0, SparsitySettings(l1=4.0)) == 4.0
