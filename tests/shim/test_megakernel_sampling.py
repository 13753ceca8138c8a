"""The kernel's choice is the reference's: on the same logits the same tokens, bit for bit, and log probabilities.

Most tests run the choice alone, on given logits (tests/choosing.py). What a bit may differ by is in `compare` there.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.config import Sampling
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import Build
from onekernel.engine.choosing import Choosing
from onekernel.phases.choose.filters import adjust, keep
from onekernel.plan.abi import LISTED, Failure
from tests import choosing
from tests.choosing import FIRST, Chooser, compare, peaked, reference
from tests.shim.conftest import Device
from tests.unit.phases.choose.oracle import ALPHA, p_value, softmax

SLOW = pytest.mark.slow

VOCAB = 203
PROMPT, OUTPUT = (5, 9, 9, 30, 200), (5, 5, 77, 9, 140, 5)
MASK = torch.rand(VOCAB, generator=torch.Generator().manual_seed(3)) < 0.7
BIAS = {4: 3.0, 77: -1.5, 38: -100.0, 202: 4.0}
WARM = Sampling(temperature=1.0, seed=11)

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 30.0},
    "seed 0": {"seed": 0},
    "last seed": {"seed": 2**64 - 1},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k all": {"top_k": 1000},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.03},
    "top_p and min_p": {"top_p": 0.8, "min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": BIAS},
    "logprobs 0": {"logprobs": 0},
    "logprobs 20": {"logprobs": 20, "temperature": 0.0},
    "greedy takes no notice of filters": {"temperature": 0.0, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.3},
    "filters": {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "everything": {
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.005,
        "temperature": 1.3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": BIAS,
        "logprobs": 5,
    },
}
FLAT = ("plain", "top_k", "top_p", "min_p", "filters", "everything", "logprobs 20")


def choosing_of(name: str = "plain", **changes: Any) -> Choosing:
    """A sequence with some of SETTINGS; masked too if everything is on."""
    sampling = replace(WARM, **{**SETTINGS[name], **changes})
    return Choosing(sampling, PROMPT + OUTPUT, len(PROMPT), MASK if name == "everything" else None)


def chooser_on(device: Device, root: Path, build: Mapping[str, int] = {}, **options: Any) -> Chooser:
    """A chooser on the shim, or on a GPU where there is one."""
    load = device.load if device.torch.type == "cuda" else lambda spec: ShimKernel(spec, timeout_s=150.0)
    return Chooser(load, choosing.spec(root, **build), device.torch, **options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return choosing.sources(tmp_path_factory.mktemp("choosing"))


@pytest.fixture
def chooser(device: Device, sources: Path) -> Callable[..., Chooser]:
    return lambda **options: chooser_on(device, sources, **options)


@pytest.mark.complaint(
    "J2",
    file="phases/choose/philox.cuh",
    old="key1 = static_cast<u32>(seed >> 32);",
    new="key1 = 0;",
)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_chooses_as_the_reference_does(chooser: Callable[..., Chooser], name: str) -> None:
    given, it = peaked(6, VOCAB), chooser(ctas=4)
    compare(it.choices(given, choosing_of(name)), reference(given, choosing_of(name)))


@pytest.mark.parametrize("name", FLAT)
def test_flat_distributions_are_cut_exactly(chooser: Callable[..., Chooser], name: str) -> None:
    """More likely tokens than the lists take: all CTAs look for the cut together."""
    given, it = peaked(3, VOCAB, scale=0.01), chooser(ctas=2)
    compare(it.choices(given, choosing_of(name)), reference(given, choosing_of(name)))
    assert it.spread == (name in ("top_p", "filters"))


def test_peaked_distributions_are_cut_in_the_lists(chooser: Callable[..., Chooser]) -> None:
    """Scaled to a likeliest token of probability 0.3 to 0.7 they need no hand-over beyond the head's."""
    given, it = peaked(4, 2000, scale=4.5), chooser(ctas=6)
    assert 0.1 < float(given.softmax(dim=1).max(dim=1).values.mean()) < 0.8
    for settings in ({"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.9, "logprobs": 20}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which), reference(given, which))
        assert not it.spread, settings


@pytest.mark.parametrize("levels", [1, 5])
def test_equal_logits_are_kept_by_their_ids(chooser: Callable[..., Chooser], levels: int) -> None:
    """The cut lies among equal scores, down to the last digit of the ids."""
    given, it = (peaked(1, VOCAB, scale=1.0) * levels / 4).round(), chooser(ctas=2)
    for settings in ({"top_k": 29}, {"top_p": 0.37}, {"top_k": 100, "top_p": 0.5}, {"min_p": 1.0}, {"logprobs": 20}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which), reference(given, which))
    greedy = Choosing(Sampling(logprobs=20))
    compare(it.choices(given, greedy), reference(given, greedy))


def test_rows_that_are_arranged_against_the_lists_are_listed_exactly(chooser: Callable[..., Chooser]) -> None:
    """19 of 32 lanes have all the high logits: more tokens reach the first places of 20 lanes than have room."""
    given, it = peaked(2, 1000), chooser(ctas=1)
    given[:, torch.arange(1000) // 2 % 32 < 19] += 40.0
    for settings in ({"top_k": 9}, {"top_p": 0.9, "top_k": 12}, {"logprobs": 20, "temperature": 0.0}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which), reference(given, which))
        assert not it.spread


def test_members_are_what_comes_up_to_the_first_tokens_of_ctas(chooser: Callable[..., Chooser]) -> None:
    """With more CTAs than have room for all that they list, most of it is left out, also where levels are equal."""
    it = chooser(ctas=40, split=5)
    settings: tuple[dict[str, Any], ...] = (
        {"top_k": 1},
        {"top_k": 12},
        {"top_p": 0.9},
        {"top_k": 30, "top_p": 0.8},
        {"min_p": 0.2},
        {"logprobs": 20, "temperature": 0.0},
        {"top_k": 9, "min_p": 0.05, "logprobs": 7},
    )
    for given in (peaked(2, 2000, scale=4.0), peaked(1, 2000, scale=4.0).round()):
        for changes in settings:
            which = Choosing(replace(WARM, **changes))
            compare(it.choices(given, which), reference(given, which))
            assert not it.spread, changes


@pytest.mark.parametrize("high", [LISTED, LISTED + 1])
def test_one_cta_may_have_as_many_likely_tokens_as_it_lists(chooser: Callable[..., Chooser], high: int) -> None:
    given, it = peaked(1, 800), chooser(ctas=4)
    given[:, 3 : 3 + 2 * high : 2] = 30.0 + 0.1 * peaked(1, high, seed=1)
    for settings in ({"top_p": 0.5}, {"min_p": 0.1}, {"top_k": high}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which), reference(given, which))
    assert it.spread == (high > LISTED)
    likeliest = Choosing(Sampling(logprobs=LISTED))
    compare(it.choices(given, likeliest), reference(given, likeliest))
    assert not it.spread


@pytest.mark.parametrize("left", [1, 5, LISTED + 3])
def test_fewer_tokens_than_are_asked_for_are_all_kept(chooser: Callable[..., Chooser], left: int) -> None:
    given, mask = peaked(2, VOCAB), torch.zeros(VOCAB, dtype=torch.bool)
    mask[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(left))[:left]] = True
    for ctas in (3, 30):
        it = chooser(ctas=ctas)
        for settings in (
            {"top_k": 40},
            {"top_k": 40, "top_p": 0.9},
            {"top_p": 1 - 1e-9},
            {"min_p": 1e-6, "logprobs": 20},
        ):
            which = Choosing(replace(WARM, **settings), mask=mask)
            compare(it.choices(given, which), reference(given, which))


def test_a_cut_by_mass_lies_among_many_members(chooser: Callable[..., Chooser]) -> None:
    """All tokens; of equal weights, and of one heavy one and dust."""
    it = chooser(ctas=25)
    dust = torch.full((1, 400), -12.0)
    dust[0, 77] = 0.0
    for given in (torch.zeros(1, 400), peaked(1, 400, scale=0.3), dust):
        for p in (1e-6, 0.3, 0.97, 0.999):
            which = Choosing(replace(WARM, top_p=p))
            compare(it.choices(given, which), reference(given, which))
            assert not it.spread


def test_the_chosen_token_s_log_probability_alone_needs_no_list(chooser: Callable[..., Chooser]) -> None:
    """So many CTAs list more tokens than the choosing one has room to keep."""
    given, it = peaked(2, 1000), chooser(ctas=40)
    for temperature in (0.0, 1.0):
        which = Choosing(replace(WARM, temperature=temperature, logprobs=0))
        compare(it.choices(given, which), reference(given, which))
        assert not it.spread


def test_more_equals_than_the_lists_have_room_for_are_looked_at_together(chooser: Callable[..., Chooser]) -> None:
    given, it = torch.zeros(1, 400), chooser(ctas=8)
    for settings in ({"top_k": 29}, {"logprobs": 20, "temperature": 0.0}, {"top_k": 50, "top_p": 0.5, "logprobs": 3}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which), reference(given, which))
        assert it.spread == ("top_k" in settings)  # the likeliest are in the lists
    many, it = peaked(3, 576, scale=0.01), chooser(ctas=36)  # all of them listed, and kept
    which = Choosing(replace(WARM, min_p=0.5))
    compare(it.choices(many, which), reference(many, which))


def test_what_mask_and_bias_exclude_is_never_chosen(chooser: Callable[..., Chooser]) -> None:
    given, it = peaked(6, VOCAB), chooser(ctas=4)
    one = torch.zeros(VOCAB, dtype=torch.bool)
    one[61] = True
    for name in ("greedy", "plain", "top_k", "tiny top_p", "everything"):
        which = Choosing(replace(WARM, **SETTINGS[name]), PROMPT, len(PROMPT), one)
        assert {choice.token_id for choice in it.choices(given[:2], which)} == {61}
    best = int(given[0].argmax())
    for temperature in (0.0, 1e-6):
        banned = Choosing(Sampling(temperature=temperature, logit_bias={best: -100.0}))
        compare(it.choices(given[:1], banned), reference(given[:1], banned))
        assert it.choices(given[:1], banned)[0].token_id != best


@pytest.mark.parametrize("name", ["greedy", "plain", "filters", "logprobs 20", "everything"])
@pytest.mark.complaint(
    "E3",
    file="phases/head/kernel.cuh",
    old="if (is_finite(value)) {",
    new="if (is_finite(value) || value < 0) {",
)
def test_no_token_is_a_reason_not_a_token(chooser: Callable[..., Chooser], name: str) -> None:
    it, which = chooser(ctas=4), choosing_of(name)
    for bad in (math.nan, math.inf, -math.inf):
        for where in (0, 100, VOCAB - 1):
            given = peaked(1, VOCAB)
            given[0, where] = bad
            assert it.failure(given, which) is Failure.LOGITS
    nothing = replace(which, mask=torch.zeros(VOCAB, dtype=torch.bool))
    assert it.failure(peaked(1, VOCAB), nothing) is Failure.EMPTY
    huge = peaked(1, VOCAB)
    huge[0, 9] = 1e30
    overflowing = Choosing(replace(which.sampling, repetition_penalty=1e-30), PROMPT, len(PROMPT))
    assert it.failure(huge, overflowing) is Failure.SCORES


@pytest.mark.complaint(
    "E4",
    file="phases/choose/choice.cuh",
    old="end = c.m.header.vocab_limit;",
    new="end = c.m.launch.logit_stride;",
)
@pytest.mark.parametrize("vocab", [9, 203, 208])
def test_padded_ids_do_not_exist(chooser: Callable[..., Chooser], vocab: int) -> None:
    """Whatever their logits: here they are the highest. With 9 ids some CTAs have no row."""
    it, limit = chooser(ctas=4), vocab - 5
    given = peaked(3, vocab)
    given[:, limit:] = 50.0
    for settings in ({}, {"top_k": 3}, {"top_p": 0.7, "logprobs": 20}, {"temperature": 0.0}):
        which = Choosing(replace(WARM, **settings))
        compare(it.choices(given, which, vocab_limit=limit), reference(given, which, vocab_limit=limit))


@pytest.mark.parametrize("name", ["penalties", "everything"])
def test_penalties_count_a_long_answer_in_one_launch_or_more(chooser: Callable[..., Chooser], name: str) -> None:
    """The same logits again and again, so that only the counts change."""
    given, it, which = (
        peaked(1, VOCAB, scale=1.0).expand(12, VOCAB),
        chooser(ctas=2),
        choosing_of(name, frequency_penalty=-1.0),
    )
    want = reference(given, which)
    whole = it.choices(given, which)
    compare(whole, want)
    ids = tuple(choice.token_id for choice in whole)
    assert max(ids.count(token) for token in ids) > 1
    later = replace(which, tokens=(*which.tokens, *ids[:5]))
    part = it.slots(given[5:, None], [later], first=FIRST + 5)[0]
    assert tuple(slot.token_id for slot in part) == ids[5:]


def test_every_partition_and_order_gives_the_same_tokens(sources: Path, host_compiler: None) -> None:
    made: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for seed, ctas in ((None, 1), (1, 3), (2, 4)):
        load = lambda spec, s=seed: ShimKernel(spec, seed=s or 0, timeout_s=60.0)  # noqa: E731
        chooser = Chooser(load, choosing.spec(sources), ctas=ctas, split=seed)
        for case in (("plain", 3.0), ("everything", 3.0), ("everything", 0.05)):
            made[case].append(chooser.choices(peaked(1, VOCAB, scale=case[1]), choosing_of(case[0])))
    for choices in made.values():
        for other in choices[1:]:
            compare(other, choices[0])


@SLOW
@pytest.mark.parametrize("warps", [1, 4])
def test_eight_sequences_choose_apart(device: Device, sources: Path, warps: int) -> None:
    """Each has settings of its own, some of which need rounds; one ends early."""
    names = ["greedy", "everything", "plain", "top_k", "top_p", "logprobs 20", "penalties", "min_p"]
    given = torch.stack([peaked(3, VOCAB, seed=s) for s in range(8)], dim=1)
    chooser = chooser_on(device, sources, {"warps": warps, "sequences": 8})
    which = [choosing_of(name) for name in names]
    wanted = [reference(given[:, s], which[s]) for s in range(8)]
    stop = wanted[3][1].token_id
    slots = chooser.slots(given, which, stop_ids=[stop])
    for of, want in zip(slots, wanted, strict=True):
        ids = [choice.token_id for choice in want]
        end = ids.index(stop) + 1 if stop in ids else 3
        assert [slot.token_id for slot in of] == ids[:end]


@SLOW
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["plain", "filters", "everything"])
def test_draws_follow_the_distribution(device: Device, sources: Path, name: str) -> None:
    """Chi-square over 1,500 draws of the kernel's, from the same logits at other positions, at alpha 1e-6."""
    draws, vocab = 1500, 40
    given = peaked(1, vocab, seed=5, scale=1.5).expand(draws, vocab)
    same = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": None}
    which = Choosing(replace(WARM, **{**SETTINGS[name], **same, "logit_bias": {4: 1.0}}))
    chooser = chooser_on(device, sources, {"warps": 1}, ctas=1)
    ids = [choice.token_id for choice in chooser.choices(given, which)]
    kept = keep(adjust(given[0], which.sampling, None, None), which.sampling)
    expected = [0.0] * vocab
    for token, probability in zip(kept.token_ids.tolist(), softmax(kept.scores.tolist()), strict=True):
        expected[token] = probability
    assert p_value(Counter(ids), expected) > ALPHA


@SLOW
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.THREAD])
def test_sanitizers_find_nothing(sources: Path, host_compiler: None, build: Build) -> None:
    small = build is Build.THREAD
    load = lambda spec: ShimKernel(spec, build=build, timeout_s=200.0)  # noqa: E731
    chooser = Chooser(load, choosing.spec(sources, warps=1 if small else 2), ctas=2)
    for name, scale in (("everything", 3.0), ("everything", 0.01), ("penalties", 1.0), ("logprobs 20", 0.01)):
        given = peaked(1 if small else 3, VOCAB, scale=scale)
        compare(chooser.choices(given, choosing_of(name)), reference(given, choosing_of(name)))
