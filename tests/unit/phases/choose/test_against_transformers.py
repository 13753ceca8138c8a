"""The same tokens and the same sampling defaults as transformers, which is imported here only (it is slow)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from onekernel.config import Sampling, SamplingParams
from onekernel.phases.choose import TokenCounts, choose
from onekernel.phases.choose.filters import adjust, keep

VOCAB = 2000
PROMPT = [3, 5, 5, 1999, *range(100, 400)]

REPETITION, TEMPERATURE, TOP_K, TOP_P, MIN_P = (1.0, 0.7, 1.3), (1.0, 0.5), (0, 1, 40), (1.0, 0.3, 0.95), (0.0, 0.05)


def processors(sampling: Sampling) -> LogitsProcessorList:
    """transformers' list for these parameters, in the order of its `_get_logits_processor`."""
    chosen = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
        *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        *([TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
        MinPLogitsWarper(sampling.min_p),
    ]
    return LogitsProcessorList(chosen)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_processed_scores_are_those_of_transformers(spread: float) -> None:
    counts = TokenCounts.start(PROMPT, 2, VOCAB)  # prompt and output count alike
    for seed, values in enumerate(itertools.product(REPETITION, TEMPERATURE, TOP_K, TOP_P, MIN_P)):
        repetition_penalty, temperature, k, p, minimum = values
        sampling = Sampling(temperature, k, p, minimum, repetition_penalty)
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
        scores = processors(sampling)(torch.tensor([PROMPT]), logits[None].clone())[0]
        kept = keep(adjust(logits, sampling, counts, None), sampling)
        assert kept.token_ids.tolist() == (scores > -torch.inf).nonzero()[:, 0].tolist(), values
        assert torch.allclose(kept.scores, scores[kept.token_ids], rtol=1e-6, atol=0), values


def test_greedy_with_a_repetition_penalty() -> None:
    for seed in range(20):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
        counts = TokenCounts.start(PROMPT, len(PROMPT), VOCAB)
        expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([PROMPT]), logits[None].clone()).argmax()
        sampling = Sampling(repetition_penalty=2.0)
        assert choose(logits, sampling, 0, counts, vocab_limit=VOCAB).token_id == int(expected)


FILES: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    {"do_sample": True, "top_k": 0, "min_p": 0.02},
    {"do_sample": True, "top_k": None},
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 7},
    {"temperature": 0.6, "top_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.2},
]
CALLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.4},
    {"temperature": 1.0, "top_k": 0},
    {"top_p": 0.5},
    {"temperature": 1.2, "top_k": 3, "top_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("file", FILES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_defaults_are_resolved_as_in_transformers(file: dict[str, Any], call: dict[str, Any]) -> None:
    wanted = {"do_sample": call["temperature"] > 0, **call} if "temperature" in call else dict(call)
    if wanted.get("do_sample") is False:
        del wanted["temperature"]  # transformers says greedy by do_sample alone
    model = SimpleNamespace(
        generation_config=GenerationConfig(**file), config=SimpleNamespace(_get_generation_parameters=dict)
    )
    full, _ = GenerationMixin._prepare_generation_config(model, None, **wanted)
    got = SamplingParams(**call).resolve(file)
    assert got.greedy is not full.do_sample
    assert got.repetition_penalty == full.repetition_penalty
    if full.do_sample:
        assert (got.temperature, got.top_k, got.top_p) == (full.temperature, full.top_k, full.top_p)
        assert got.min_p == (full.min_p or 0.0)
