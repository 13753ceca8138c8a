"""The choice of tokens on a real GPU at Llama's vocabulary: the reference's tokens on the same logits, bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from onekernel.config import Sampling
from onekernel.device.cuda_kernel import load_kernel
from onekernel.device.facts import facts
from onekernel.device.support import architecture
from onekernel.engine.choosing import Choosing
from onekernel.phases.choose import TokenCounts, choose
from onekernel.phases.choose.filters import adjust, keep
from onekernel.plan.abi import Failure
from tests import choosing
from tests.choosing import Chooser, compare, peaked, reference
from tests.gpu.test_megakernel import SHAPES, Rig, case_of
from tests.megakernels import prompt_of
from tests.unit.phases.choose.oracle import ALPHA, p_value, softmax

pytestmark = pytest.mark.timeout(120)

GPU = "cuda:0"
VOCAB = 128256
PROMPT, OUTPUT = tuple(range(50, 90)), (60, 128000, 128255, 60, 7)
MASK = torch.rand(VOCAB, generator=torch.Generator().manual_seed(3)) < 0.5

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 20},
    "plain": {},
    "last seed": {"seed": 2**64 - 1},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "everything": {
        "top_k": 64,
        "top_p": 0.9,
        "min_p": 0.005,
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {60: 3.0, 61: -100.0},
        "logprobs": 5,
    },
}
SCALES = {"a likeliest token of 0.3 to 0.7": 4.2, "normal": 2.0, "flat": 0.01}


@pytest.fixture(scope="module")
def chooser(tmp_path_factory: pytest.TempPathFactory) -> Chooser:
    """With as many CTAs and warps as the engine uses."""
    root = choosing.sources(tmp_path_factory.mktemp("choosing"))
    spec = replace(choosing.spec(root, warps=16), arch=architecture(facts(GPU)))
    return Chooser(lambda spec: load_kernel(spec, GPU), spec, torch.device(GPU), ctas=facts(GPU).sm_count)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_choice_is_the_reference_s(chooser: Chooser, name: str, scale: str) -> None:
    sampling = replace(Sampling(temperature=1.0, seed=11), **SETTINGS[name])
    which = Choosing(sampling, PROMPT + OUTPUT, len(PROMPT), MASK if name == "everything" else None)
    given = peaked(24, VOCAB, scale=SCALES[scale])
    compare(chooser.choices(given, which), reference(given, which))


def test_ties_are_cut_by_their_ids(chooser: Chooser) -> None:
    given = peaked(3, VOCAB, scale=1.0).round()
    for settings in ({"top_k": 1000}, {"top_p": 0.3}, {"top_k": 5000, "top_p": 0.5, "logprobs": 20}):
        which = Choosing(replace(Sampling(temperature=1.0), **settings))
        compare(chooser.choices(given, which), reference(given, which))


def test_launches_repeat_and_partitions_agree(chooser: Chooser) -> None:
    given = peaked(8, VOCAB, scale=2.0)
    for name in ("plain", "everything"):
        which = Choosing(replace(Sampling(temperature=1.0, seed=3), **SETTINGS[name]), PROMPT, len(PROMPT))
        first = chooser.choices(given, which)
        assert chooser.choices(given, which) == first
        other = Chooser(chooser.load, chooser.spec, chooser.device, ctas=chooser.ctas - 5, split=4)
        compare(other.choices(given, which), first)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p"])
def test_draws_follow_the_distribution(chooser: Chooser, name: str) -> None:
    """Chi-square over 4,000 draws from the same logits at other positions, at alpha 1e-6."""
    draws, vocab = 4000, 400
    given = peaked(1, vocab, seed=5, scale=1.5).expand(draws, vocab)
    which = Choosing(replace(Sampling(temperature=0.9, seed=11), **SETTINGS[name]))
    ids = [choice.token_id for choice in chooser.choices(given, which)]
    kept = keep(adjust(given[0], which.sampling, None, None), which.sampling)
    expected = [0.0] * vocab
    for token, probability in zip(kept.token_ids.tolist(), softmax(kept.scores.tolist()), strict=True):
        expected[token] = probability
    assert p_value(Counter(ids), expected) > ALPHA


@pytest.mark.parametrize("name", ["greedy", "plain", "everything"])
def test_no_token_is_a_reason(chooser: Chooser, name: str) -> None:
    which = Choosing(replace(Sampling(temperature=1.0), **SETTINGS[name]), PROMPT, len(PROMPT))
    given = peaked(1, VOCAB)
    given[0, 70000] = float("nan")
    assert chooser.failure(given, which) is Failure.LOGITS
    nothing = replace(which, mask=torch.zeros(VOCAB, dtype=torch.bool))
    assert chooser.failure(peaked(1, VOCAB), nothing) is Failure.EMPTY


@pytest.mark.parametrize("name", SETTINGS)
def test_a_whole_answer_is_one_launch_and_drawn_from_the_kernel_s_logits(name: str) -> None:
    """The last token's logits are those that the kernel leaves; so every length of answer shows one token."""
    rig = Rig(case_of(SHAPES["Llama-3.2-1B"]))
    prompt = prompt_of(rig.case.config, 200)
    sampling = replace(Sampling(temperature=1.0, seed=7), **SETTINGS[name])
    whole = rig.decode(prompt, 12, sampling=sampling)
    for length in (1, 2, 7, 12):
        before = rig.kernel.launches
        answer = rig.decode(prompt, length, sampling=sampling)
        assert rig.kernel.launches - before == 1
        assert answer == whole[:length]
        counts = TokenCounts.start(prompt + answer[:-1], len(prompt), rig.case.config.vocab_size)
        logits = rig.megakernel.logits[0].cpu()
        choice = choose(logits, sampling, len(prompt) + length - 1, counts, vocab_limit=rig.case.config.vocab_size)
        assert choice.token_id == answer[-1]
