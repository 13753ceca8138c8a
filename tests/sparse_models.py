"""Tiny models with a ReLU gate, of which as many neurons fire as a test wants, and their cases on the megakernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from onekernel.config import ModelConfig
from onekernel.models.model import ModelWeights
from onekernel.models.packed import PackedModel, pack
from onekernel.plan.plan import Plan
from onekernel.weights.neurons import places_of
from tests.megakernels import Case, prompt_of, small_plan
from tests.unit.plan.models import BASE, CONFIGS, random_weights

RELU = replace(BASE, hidden_act="relu")
SHAPES = {"relu": RELU, "odd": CONFIGS["odd"], "tied": replace(CONFIGS["tied"], hidden_act="relu")}

ALWAYS, NEVER = 4.0, -4.0
"""Gate biases beyond what the other channels add up to where those are weak."""


def biased_weights(config: ModelConfig, biases: torch.Tensor, device: str = "cpu") -> ModelWeights:
    """Random weights in which neuron n's gate has the bias biases[n], times something positive that tokens decide.

    The last hidden channel is a constant: embeddings hold it and no layer writes to it. What layers write to the others
    is small, so that the norm leaves it a constant, and gates with a bias of ALWAYS or NEVER hardly look at them.
    """
    fixed = biases.abs() == ALWAYS
    weights = random_weights(config, device=device)
    weights.embedding[:, -1] = 1.0
    for layer in weights.layers:
        assert isinstance(layer.out, torch.Tensor) and isinstance(layer.down, torch.Tensor)
        assert isinstance(layer.gate_up, torch.Tensor)
        layer.out[-1] = 0
        layer.down[-1] = 0
        layer.down.mul_(0.1)
        layer.gate_up[: config.intermediate_size][fixed.to(device)] *= 0.01
        layer.gate_up[: config.intermediate_size, -1] = biases.to(device, layer.gate_up.dtype)
        layer.mlp_norm[-1] = 1.0
    return weights


def biases_for(what: str, config: ModelConfig, ctas: int = 3) -> torch.Tensor:
    """Gate biases: 'none', 'all', 'one' neuron always, 'half', about 'tenth', 'hundredth' of them, or 'cta' 1's."""
    inner = config.intermediate_size
    everywhere = {"none": NEVER, "all": ALWAYS, "one": NEVER, "cta": NEVER}
    levels = {"half": 0.0, "tenth": -1.5, "hundredth": -3.0}
    biases = torch.full((inner,), (everywhere | levels)[what])
    if what == "one":
        biases[inner // 3] = ALWAYS
    if what == "cta":
        plan = small_plan(config, ctas, active_fraction=0.1)
        gate = next(phase.index for phase in plan.phases if phase.kind.name == "GATE")
        place = plan.layout.matrices["gate", 0]
        first, count = (int(plan.tasks[name][1, gate]) * place.tile_rows for name in ("first", "count"))
        places = places_of(inner, place.padded_rows)
        biases[(places >= first) & (places < first + count)] = ALWAYS
    return biases


def sparse_case(what: str, name: str = "relu", ctas: int = 3, *, device: str = "cpu", **options: Any) -> Case:
    """A model of SHAPES, planned with sparse feed-forwards."""
    config = SHAPES[name]
    weights = biased_weights(config, biases_for(what, config, ctas), device)
    plan = small_plan(config, ctas, **{"active_fraction": 0.1, **options})
    return Case(config, weights, plan, pack(weights, config, plan.layout))


def packed_for(case: Case, plan: Plan) -> PackedModel:
    """A case's weights in the layout of another plan."""
    assert isinstance(case.weights, ModelWeights)
    return pack(case.weights, case.config, plan.layout)


def prompts_of(case: Case, tokens: int = 70) -> list[list[int]]:
    """One random prompt."""
    return [prompt_of(case.config, tokens)]
