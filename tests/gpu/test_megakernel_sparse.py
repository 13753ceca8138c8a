"""Sparse feed-forwards in the megakernel on a real GPU: exact whatever fires, repeatable, counted, chosen at load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.engine.megakernel_load import assemble, plan_megakernel
from onekernel.models.packed import pack
from onekernel.models.packed_weights import PackedWeights
from onekernel.models.registry import model_config
from onekernel.weights.shipped import read_shipped
from tests.megakernels import Case, prompt_of
from tests.sparse_models import RELU, biased_weights, biases_for

pytestmark = pytest.mark.timeout(90)

GPU = "cuda:0"
TOKENS = 24
LLAMA = replace(model_config(read_shipped("Llama-3.2-1B")), num_hidden_layers=2, hidden_act="relu")
SHAPES = {
    "Llama-3.2-1B": LLAMA,
    "head128": replace(LLAMA, num_attention_heads=16, num_key_value_heads=8, head_dim=128, qk_norm=True),
    "odd": replace(RELU, hidden_size=1002, intermediate_size=5003, head_dim=20, vocab_size=1003, hidden_act="relu2"),
}


def case_of(name: str, what: str) -> Case:
    """The plan that the engine would make. The packed weights are the only ones: the reference unpacks them."""
    config = SHAPES[name]
    planned = plan_megakernel(config, GPU, torch.bfloat16, 512, config.vocab_size)
    assert planned.plan is not None, planned.reason
    assert planned.plan.layout.sparse
    packed = pack(biased_weights(config, biases_for(what, config), GPU), config, planned.plan.layout)
    return Case(config, PackedWeights(packed), planned.plan, packed)


@pytest.mark.parametrize("what", ["none", "hundredth", "tenth", "half", "all", "one"])
@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_the_references_and_the_same_every_time(name: str, what: str) -> None:
    it = case_of(name, what)
    megakernel = assemble(it.plan, it.packed, GPU, print)
    prompts = [prompt_of(it.config, 70)]
    made = it.run(megakernel, prompts, TOKENS)
    it.check(prompts, made, TOKENS)
    active = megakernel.active_neurons()
    assert active is not None
    exact = {"none": 0, "one": 1, "all": it.config.intermediate_size}
    assert what not in exact or active == (exact[what],) * len(active)
    for _ in range(5):
        again = it.run(megakernel, prompts, TOKENS)
        assert again.tokens == made.tokens and torch.equal(again.logits, made.logits)


@pytest.mark.parametrize(("sparse", "chosen"), [("auto", True), ("off", False)])
def test_the_engine_serves_it(tmp_path: Path, sparse: Any, chosen: bool) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 2112,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1003,
        "max_position_embeddings": 256,
        "hidden_act": "relu",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with LLM(str(tmp_path), load_format="dummy", device=GPU, backend="megakernel", sparse=sparse) as llm:
        answer = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        active = llm.loaded.engine.backend.active_neurons  # type: ignore[attr-defined]
    assert len(answer.token_ids) == 8
    assert (active is not None and 0 < active[0] < 2112) == chosen
