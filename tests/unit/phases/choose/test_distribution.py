"""Tokens come with the probabilities the parameters ask for: chi-square over 20,000 draws each, at alpha 1e-6.

Seeds are fixed, so a test that passes once passes always. The probabilities come from `oracle`, in float64.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from onekernel.config import Sampling
from onekernel.phases.choose import choose
from onekernel.phases.choose.draw import draw_many
from onekernel.phases.choose.filters import adjust, keep
from tests.unit.phases.choose.oracle import ALPHA, ORDER, Case, chi_square_tail, p_value, softmax

LOGITS = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2.0).tolist()
PROMPT, OUTPUT, BANNED = (0, 32, 32, 7, 20), (5, 5, 5, 39, 20, 13, 13), frozenset({2, 44, 28})

SETTINGS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.08},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {4: 3.0, 39: -1.5, 38: -100.0}},
}
TRUNCATING = ("top_k", "top_p", "min_p")


def case(*names: str, **changes: object) -> Case:
    """A case with the named settings on, at temperature 1 unless that is one of them."""
    merged = {"temperature": 1.0} | {key: value for name in names for key, value in SETTINGS[name].items()} | changes
    return Case(LOGITS, Sampling(**merged), PROMPT, OUTPUT)  # type: ignore[arg-type]


COMBINATIONS = [
    (),
    *((name,) for name in SETTINGS),
    *itertools.combinations(TRUNCATING, 2),
    *(("temperature", *names) for n in (1, 2, 3) for names in itertools.combinations(TRUNCATING, n)),
    ("repetition", "presence", "frequency"),
    ("bias", "repetition", "presence", "frequency", "top_p"),
    tuple(SETTINGS),
]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_draws_follow_the_distribution(names: tuple[str, ...]) -> None:
    given = replace(case(*names), banned=BANNED) if len(names) > 3 else case(*names)
    assert p_value(given.draws(seed=len(names)), given.probabilities()) > ALPHA


@pytest.mark.parametrize("temperature", [0.05, 0.3, 2.0, 100.0])
def test_draws_follow_the_distribution_at_any_temperature(temperature: float) -> None:
    given = case(temperature=temperature)
    assert p_value(given.draws(seed=9), given.probabilities()) > ALPHA


def test_kept_tokens_and_scores_of_every_combination_of_settings() -> None:
    for n in range(len(SETTINGS) + 1):
        for names in itertools.combinations(SETTINGS, n):
            given = replace(case(*names), banned=BANNED if n % 2 else frozenset())
            scores = adjust(torch.tensor(LOGITS), given.sampling, given.counts, given.mask)
            kept = keep(scores, given.sampling)
            expected = given.probabilities()
            assert [i for i, p in enumerate(expected) if p > 0] == [
                i for i, s in zip(kept.token_ids.tolist(), kept.scores.tolist(), strict=True) if s > -1e30
            ], names
            got = softmax(kept.scores.tolist())
            assert got == pytest.approx([expected[i] for i in kept.token_ids.tolist()], rel=1e-5), names


def swapped(first: str, second: str) -> tuple[str, ...]:
    """The documented order with two steps exchanged."""
    return tuple({first: second, second: first}.get(step, step) for step in ORDER)


SWAPS = {
    ("mask", "top_k"): replace(case("top_k"), banned=frozenset({39, 13})),
    ("mask", "top_p"): replace(case("top_p"), banned=frozenset(sorted(range(50), key=LOGITS.__getitem__)[-3:])),
    ("bias", "repetition"): case("bias", "repetition", logit_bias={5: 4.0, 13: 2.0, 20: 4.0}),
    ("bias", "temperature"): case("bias", "temperature"),
    ("bias", "top_k"): case("bias", "top_k"),
    ("repetition", "presence"): case("repetition", "presence", presence_penalty=-2.0),
    ("repetition", "frequency"): case("repetition", "frequency"),
    ("presence", "temperature"): case("presence", "temperature"),
    ("frequency", "temperature"): case("frequency", "temperature"),
    ("presence", "top_k"): case("presence", "top_k", presence_penalty=2.0, top_k=3),
    ("temperature", "top_p"): case("temperature", "top_p"),
    ("temperature", "min_p"): case("temperature", "min_p"),
    ("top_k", "top_p"): case("top_k", "top_p", top_k=6, top_p=0.75),
    ("top_p", "min_p"): case("top_p", "min_p", min_p=0.15, top_p=0.9),
}


@pytest.mark.complaint(
    "J3",
    file="phases/choose/filters.py",
    old="kept = top_k(kept, sampling.top_k)\n    kept = top_p(kept, sampling.top_p)\n",
    new="kept = top_p(kept, sampling.top_p)\n    kept = top_k(kept, sampling.top_k)\n",
)
@pytest.mark.parametrize("steps", SWAPS, ids=" before ".join)
def test_two_steps_in_the_wrong_order_are_noticed(steps: tuple[str, str]) -> None:
    given = SWAPS[steps]
    draws = given.draws(seed=3)
    assert p_value(draws, given.probabilities()) > ALPHA
    assert p_value(draws, given.probabilities(swapped(*steps))) < ALPHA


def test_neighbouring_positions_and_neighbouring_seeds_are_independent() -> None:
    logits = [1.0, 0.5, 0.0, -0.5, -1.0]
    flat = Case(logits, Sampling(temperature=1.0))
    kept = keep(torch.tensor(logits), flat.sampling)
    joint = [p * q for p in flat.probabilities() for q in flat.probabilities()]
    positions = torch.arange(40_000)
    first = draw_many(kept, 1, positions)
    for second in (draw_many(kept, 1, positions + 1), draw_many(kept, 2, positions), draw_many(kept, 2**32, positions)):
        pairs = Counter((5 * first + second)[::2].tolist())
        assert p_value(pairs, joint) > ALPHA


def test_draws_over_seeds_at_one_position() -> None:
    given = case("top_k")
    draws = Counter(
        choose(torch.tensor(LOGITS), replace(given.sampling, seed=seed), 17, vocab_limit=50).token_id
        for seed in range(2_000)
    )
    assert p_value(draws, given.probabilities()) > ALPHA


def test_one_by_one_equals_all_at_once() -> None:
    for given in (case(), case("top_p"), case(*SETTINGS)):
        expected = given.draws(seed=5, count=200)
        singles = Counter(
            choose(
                torch.tensor(LOGITS), replace(given.sampling, seed=5), position, given.counts, vocab_limit=50
            ).token_id
            for position in range(200)
        )
        assert singles == expected


@pytest.mark.parametrize(
    ("x", "freedom", "tail"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (37.697298, 15, 0.001), (67.504807, 50, 0.05)],
)
def test_the_chi_square_test_itself(x: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(x, freedom) == pytest.approx(tail, rel=1e-3)


def test_the_chi_square_test_sees_a_shift_of_two_percent() -> None:
    draws = case().draws(seed=1)
    probabilities = case().probabilities()
    best, other = sorted(range(50), key=probabilities.__getitem__)[-2:]
    probabilities[best] -= 0.02
    probabilities[other] += 0.02
    assert p_value(draws, probabilities) < ALPHA
