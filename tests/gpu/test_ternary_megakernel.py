"""Ternary models on the megakernel of a real GPU: each phase's bits, answers, and one copy for decode and prefill."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.config import ModelConfig
from onekernel.engine.megakernel_load import assemble, plan_megakernel
from onekernel.engine.ternary import operators_for
from onekernel.models.packed_weights import PackedWeights
from onekernel.models.registry import model_config
from onekernel.weights.shipped import read_shipped
from tests.megakernels import prompt_of
from tests.ternary_megakernels import CONFIGS, TernaryCase

pytestmark = pytest.mark.timeout(300)

GPU = "cuda:0"
CONTEXT = 512


def bitnet_2b(**quantization: Any) -> ModelConfig:
    """The published shape with two layers."""
    published = read_shipped("bitnet-b1.58-2B-4T")
    quantization = published["quantization_config"] | quantization
    return replace(model_config(published | {"quantization_config": quantization}), num_hidden_layers=2)


def qwen3(group: int) -> ModelConfig:
    published = read_shipped("Ternary-Qwen3-1.7B")
    quantization = published["quantization_config"] | {"head": "dense", "group_size": group}
    return replace(model_config(published | {"quantization_config": quantization}), num_hidden_layers=2)


SHAPES = {
    **{name: replace(config, max_position_embeddings=CONTEXT) for name, config in CONFIGS.items()},
    "2B-4T": bitnet_2b(),
    "2B-4T, int8 head": bitnet_2b(head="int8"),
    "Qwen3-1.7B, groups of 128": qwen3(128),
    "Qwen3-1.7B, groups of 64": qwen3(64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_phases_have_the_reference_s_bits_and_answers_its_tokens(name: str) -> None:
    """With the plan, the warps and the ring that the engine would take."""
    config = SHAPES[name]
    planned = plan_megakernel(config, GPU, torch.bfloat16, CONTEXT, config.vocab_size)
    assert planned.plan is not None, planned.reason
    case = TernaryCase.of(config, planned.plan, GPU)
    megakernel = assemble(case.plan, case.packed, GPU, print)
    megakernel.cache.pages.fill_(float("nan"))
    prompt = prompt_of(config, 300)
    case.check_phases(megakernel, prompt)
    tokens = case.check_answer(megakernel, prompt, 8)
    assert case.check_answer(megakernel, prompt, 8) == tokens


def test_operators_read_the_megakernel_s_copy() -> None:
    config = SHAPES["2B-4T"]
    planned = plan_megakernel(config, GPU, torch.bfloat16, CONTEXT, config.vocab_size)
    assert planned.plan is not None, planned.reason
    case = TernaryCase.of(config, planned.plan, GPU)
    gc.collect()  # what earlier tests left must not go away meanwhile
    before = torch.cuda.memory_allocated()
    layer, own = PackedWeights(case.packed, operators_for(case.packed)).layers[1], case.weights.layers[1]
    assert torch.cuda.memory_allocated() == before
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(tokens))
        for kind in ("qkv", "gate_up"):
            ours, theirs = getattr(layer, kind), getattr(own, kind)
            assert torch.equal(ours.linear(x.to(GPU)).cpu(), theirs.linear(x))


def test_2b_4t_is_loaded_onto_the_megakernel_and_generates() -> None:
    """Through `LLM`, random weights in its published layout: greedy and sampled text repeat."""
    prompt = list(range(100))
    greedy = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=32, temperature=0.8, top_k=50, seed=7, ignore_eos=True)
    # Reused pages leave a shorter prompt, which PyTorch rounds otherwise; and these weights' logits are flat.
    options = {"device": GPU, "backend": "megakernel", "max_context": 2048, "prefix_cache": False}
    with LLM("bitnet-b1.58-2B-4T", load_format="dummy", **options) as llm:
        first, second = (llm.generate(prompt, greedy).token_ids for _ in range(2))
        again = [llm.generate(prompt, drawn).token_ids for _ in range(2)]
    assert first == second and len(set(first)) > 8
    assert again[0] == again[1] != first
