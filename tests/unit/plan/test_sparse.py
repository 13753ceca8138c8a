"""Plans with sparse feed-forwards: sound, as good as the reference, and refused where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError, PlanError
from onekernel.models.packed import pack
from onekernel.models.packed_weights import PackedWeights, scratch_bytes
from onekernel.phases.down.reference import down
from onekernel.phases.gate.reference import gate
from onekernel.phases.gate_up.reference import gate_up
from onekernel.phases.gather.reference import gather
from onekernel.plan.abi import Kind
from onekernel.plan.interpreter import interpret
from onekernel.plan.limits import Limits
from onekernel.plan.plan import Plan, make_plan
from onekernel.plan.validate import validate
from onekernel.weights.neurons import places_of
from tests.sparse_models import SHAPES, biased_weights, biases_for
from tests.unit.plan.models import random_weights
from tests.unit.plan.runs import limits

BIG = replace(
    SHAPES["relu"], hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64
)


def sparse_plan(name: str, ctas: int, **options: Any) -> Plan:
    return make_plan(SHAPES[name], limits(SHAPES[name], ctas), **{"active_fraction": 0.1, **options})


@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_tiny_plans_are_sound(name: str, ctas: int) -> None:
    for options in ({}, {"tile_rows": 4}, {"order": list(range(ctas))[::-1]}, {"active_fraction": 1.0}):
        validate(sparse_plan(name, ctas, **options))


def test_a_real_shape_is_sound_and_balanced_for_the_neurons_that_are_assumed_to_fire() -> None:
    machine = Limits(ctas=132, max_context=1024, num_pages=16)
    few, all_of_them = (make_plan(BIG, machine, active_fraction=fraction) for fraction in (0.05, 1.0))
    validate(few)
    dense = make_plan(BIG, machine)
    assert all_of_them.bytes_per_token == pytest.approx(dense.bytes_per_token, rel=1e-3)
    neurons = few.layout.neurons[0]
    saved = 0.95 * neurons.total_bytes * BIG.num_hidden_layers
    assert few.bytes_per_token == pytest.approx(dense.bytes_per_token - saved, rel=1e-3)
    assert few.layout.total_bytes == pytest.approx(dense.layout.total_bytes, rel=1e-3), "one copy"
    assert few.imbalance < 1.05 and few.hand_overs == dense.hand_overs


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (replace(BIG, hidden_act="silu"), {}, "hidden_act is silu, with which all neurons fire"),
        (replace(BIG, mlp_bias=True), {}, "have biases"),
        (BIG, {"active_fraction": 1.5}, "active_fraction is 1.5"),
        (BIG, {"partition": "level"}, "partition level"),
        (replace(BIG, intermediate_size=512), {}, "512 neurons in tiles of . are too few for 132 CTAs"),
    ],
)
def test_what_cannot_be_sparse_is_refused(config: ModelConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(config, Limits(ctas=132, max_context=64, num_pages=1), **{"active_fraction": 0.1, **options})


def test_eight_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="one sequence, and 8"):
        make_plan(BIG, Limits(ctas=4, max_context=64, num_pages=1, sequences=8), active_fraction=0.1)


@pytest.mark.parametrize(
    ("kind", "field", "change", "message"),
    [
        (Kind.GATE, "weights", 1024, "weights"),
        (Kind.GATE, "count", -1, "do not cover"),
        (Kind.GATE, "norm", 4, "norm"),
        (Kind.GATE, "out_word", 2, "out_word"),
        (Kind.GATHER, "first", 1, "do not cover"),
        (Kind.GATHER, "in_phase", -1, "of phase|never written"),
        (Kind.GATHER, "in_word", 2, "in_word"),
        (Kind.GATHER, "flags", 1, "flags"),
    ],
)
def test_faults_are_named(kind: Kind, field: str, change: int, message: str) -> None:
    plan = sparse_plan("relu", 3)
    phase = next(phase.index for phase in plan.phases if phase.kind == kind and phase.layer == 1)
    plan.tasks[field][0, phase] = int(plan.tasks[field][0, phase]) + change
    with pytest.raises(PlanError, match=message):
        validate(plan)


def test_a_header_that_points_astray_is_refused() -> None:
    for name in ("neuron_tiles", "counts_word"):
        plan = sparse_plan("relu", 3)
        plan.header[name] += 1
        with pytest.raises(PlanError, match=name):
            validate(plan)


@pytest.mark.parametrize("name", SHAPES)
def test_packed_weights_unpack_to_what_they_were(name: str) -> None:
    config, weights = SHAPES[name], random_weights(SHAPES[name])
    plan = sparse_plan(name, 3)
    packed = PackedWeights(pack(weights, config, plan.layout))
    for own, given in zip((packed.layers[i] for i in range(len(weights.layers))), weights.layers, strict=True):
        for matrix in ("qkv", "out", "gate_up", "down"):
            assert torch.equal(getattr(own, matrix), getattr(given, matrix)), matrix
    assert scratch_bytes(plan.layout) >= 2 * (3 * config.hidden_size * config.intermediate_size)


@pytest.mark.parametrize("what", ["none", "half", "all"])
def test_the_interpreter_answers_as_dense_phases_do(what: str) -> None:
    config = SHAPES["relu"]
    weights, table = biased_weights(config, biases_for(what, config)), torch.arange(5)[None]
    answers = []
    for fraction in (0.5, None):
        plan = make_plan(config, limits(config, 3), active_fraction=fraction)
        pages = torch.zeros(2, 44, 2, 2, 64, 16, dtype=torch.bfloat16)
        answers.append(interpret(plan, pack(weights, config, plan.layout), pages, table, [7], [40], limit=3, seed=1))
    sparse, dense = answers
    assert sparse.tokens == dense.tokens
    assert float((sparse.logits - dense.logits).norm() / dense.logits.norm()) < 1e-2


def test_the_phases_references_are_the_dense_feed_forward() -> None:
    config = SHAPES["relu"]
    layer = random_weights(config).layers[0]
    assert isinstance(layer.gate_up, torch.Tensor) and isinstance(layer.down, torch.Tensor)
    residual = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(1))
    order = places_of(config.intermediate_size, config.intermediate_size).argsort()
    sums = gate(residual, layer.mlp_norm, 1e-5, layer.gate_up, layer.down, "relu", order.split(30))
    assert sums.shape == (3, config.hidden_size)

    inner = gate_up(residual, layer.mlp_norm, 1e-5, layer.gate_up.float(), None, "relu")
    want = down(residual, inner, layer.down.float(), None)
    assert float((gather(residual, sums) - want).norm() / want.norm()) < 1e-2
