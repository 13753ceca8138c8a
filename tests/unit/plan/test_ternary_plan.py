"""Plans of ternary models: proved sound, shared out by their own bytes, interpreted to what the reference computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onekernel.config import ModelConfig, Ternary
from onekernel.engine.memory import plan_memory
from onekernel.errors import ConfigError, PlanError
from onekernel.models.model import Place
from onekernel.models.packed import allocate
from onekernel.plan.abi import HEADER, TASK, Flag, Kind
from onekernel.plan.interpreter import interpret
from onekernel.plan.limits import Limits
from onekernel.plan.plan import Plan, make_plan
from onekernel.plan.shared import quantised_run
from onekernel.plan.validate import validate
from tests.megakernels import prompt_of, small_limits, small_plan
from tests.ternary_megakernels import BITNET, CONFIGS, LOGITS, HandedOver, TernaryCase

BITNET_2B = replace(
    BITNET,
    hidden_size=2560,
    intermediate_size=6912,
    num_hidden_layers=30,
    num_attention_heads=20,
    num_key_value_heads=5,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=4096,
    rope_theta=5e5,
)


def h200(config: ModelConfig) -> Plan:
    return make_plan(config, Limits(ctas=132, max_context=4096, num_pages=64))


@pytest.mark.parametrize(
    ("name", "ctas"),
    [
        ("bitnet", 6),
        ("groups of 64", 1),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in CONFIGS),
    ],
)
def test_an_interpreted_plan_makes_the_reference_s_tokens(name: str, ctas: int) -> None:
    config = CONFIGS[name]
    case = TernaryCase.of(config, small_plan(config, ctas))
    validate(case.plan)
    prompt = prompt_of(config, 66)
    cache, table = case.filled(prompt)
    pages, model = cache.pages.clone(), HandedOver(config, case.weights)
    answer = interpret(case.plan, case.packed, pages, table[None], prompt[-1:], [len(prompt) - 1], limit=3, seed=ctas)
    for step, token in enumerate([prompt[-1], *answer.tokens[0][:-1]]):
        want = model.logits([token], Place(cache, table, case.rope, len(prompt) - 1 + step))[0]
        got = answer.logits[step, 0]
        assert float((got - want).norm() / want.norm()) < LOGITS
        assert int(got.argmax()) == answer.tokens[0][step]


@pytest.mark.parametrize("head", ["dense", "int8"])
def test_the_published_2b_model_fits_and_is_counted_by_its_bytes(head: str) -> None:
    plan = h200(replace(BITNET_2B, ternary=Ternary(head=head)))  # type: ignore[arg-type]
    layers = 30 * (3840 * 2560 + 2560 * 2560 + 13824 * 2560 + 2560 * 6912) // 4
    assert plan.bytes_per_token == layers + 128256 * 2560 * (2 if head == "dense" else 1)
    assert plan.bytes_per_token == plan.layout.bytes_per_token
    assert plan.shared.stages >= 8
    assert plan.imbalance < 1.1
    assert plan.shared.total_bytes <= plan.limits.shared_bytes


def test_the_published_2b_model_takes_the_memory_of_one_copy() -> None:
    """On torch's meta device, with a context of 4,096."""
    plan = h200(BITNET_2B)
    needs = plan_memory(BITNET_2B, torch.bfloat16, "cuda:0", 4096, plan)
    arenas = allocate(BITNET_2B, plan.layout, "meta")
    assert needs.weights_bytes == arenas.arena.nbytes + arenas.constants.nbytes
    assert needs.weights_bytes < 1.19e9 and needs.total_bytes < 1.65e9
    int8 = replace(BITNET_2B, ternary=Ternary(head="int8"))
    assert plan_memory(int8, torch.bfloat16, "cuda:0", 4096, h200(int8)).total_bytes < 2e9  # with an embedding of bf16


def test_group_scales_have_room() -> None:
    qwen = replace(
        CONFIGS["groups of 128"],
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )
    assert h200(qwen).shared.stages >= 6
    assert h200(replace(qwen, ternary=Ternary(group=64))).shared.stages >= 5


def test_what_cannot_be_planned_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError, match="embedding and head are ternary"):
        h200(replace(BITNET_2B, ternary=Ternary(head="ternary")))
    with pytest.raises(ConfigError, match="sub-norms and dense weights"):
        small_plan(replace(BITNET, ternary=None))
    with pytest.raises(ConfigError, match="8 sequences of a ternary model"):
        make_plan(BITNET, small_limits(3, 8, sequences=8))


@pytest.mark.parametrize("warps", [4, 8, 12, 16])
@pytest.mark.parametrize("k_units", [4, 8, 12, 40, 80, 100])
def test_runs_of_an_int8_head_end_with_a_stage(k_units: int, warps: int) -> None:
    run = quantised_run(k_units, warps)
    assert run * k_units % (2 * warps) == 0
    assert all(tiles * k_units % (2 * warps) for tiles in range(1, run))


@pytest.mark.parametrize("field", ["flags", "norm", "k_units", "inputs"])
@pytest.mark.parametrize("kind", [Kind.OUT, Kind.DOWN, Kind.HEAD])
def test_a_wrong_record_is_found(field: str, kind: Kind) -> None:
    config = CONFIGS["int8 head"]
    plan = small_plan(config)
    phase = next(phase.index for phase in plan.phases if phase.kind == kind)
    tasks = plan.tasks.copy()
    tasks[field][:, phase] ^= 4
    with pytest.raises(PlanError):
        validate(replace(plan, tasks=tasks))


def test_scales_are_where_the_header_says() -> None:
    plan = small_plan(CONFIGS["int8 head"])
    constants, header = plan.layout.constants, plan.header
    for (kind, layer), offset in constants.scales.items():
        start = header["qkv_scales"] if kind == "head" else header[f"{kind}_scales"]
        turns = plan.config.num_hidden_layers if kind == "head" else layer
        assert offset == int(start) + turns * int(header["layer_scales"])
    assert {"inner", "layer_scales"} <= set(HEADER.dtype.names or ()) and TASK.dtype.itemsize == 64
    flags = plan.tasks["flags"]
    kinds = plan.tasks["kind"]
    assert set(np.unique(flags[kinds == Kind.HEAD])) == {Flag.INT8}
    assert set(np.unique(flags[kinds == Kind.DOWN])) == {Flag.TERNARY}


def test_values_that_are_no_numbers_make_no_token() -> None:
    config = BITNET
    case = TernaryCase.of(config, small_plan(config))
    prompt = prompt_of(config, 5)
    cache, table = case.filled(prompt)
    constants = case.packed.constants.clone()
    constants[case.plan.layout.constants.mlp_norms[0]] = torch.nan
    answer = interpret(
        case.plan, replace(case.packed, constants=constants), cache.pages, table[None], prompt[-1:], [4], limit=2
    )
    assert answer.finite == (False,)
