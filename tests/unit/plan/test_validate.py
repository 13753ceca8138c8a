"""Sound plans pass, whatever shape and machine; each kind of fault is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onekernel.errors import PlanError
from onekernel.models.registry import model_config
from onekernel.plan.abi import Kind
from onekernel.plan.limits import Limits
from onekernel.plan.ordering import check_order
from onekernel.plan.plan import Plan, make_plan
from onekernel.plan.validate import validate
from onekernel.weights.shipped import read_shipped
from tests.unit.plan.models import CONFIGS
from tests.unit.plan.runs import plan_of, with_layers


@pytest.mark.parametrize("ctas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_plans_are_sound(name: str, ctas: int) -> None:
    for options in ({}, {"partition": "level"}, {"tile_rows": 4}, {"order": list(range(ctas))[::-1]}):
        validate(plan_of(name, ctas, **options))


@pytest.mark.parametrize(("name", "ctas"), [("Llama-3.2-1B", 132), ("Qwen3-8B", 170), ("SmolLM2-135M", 78)])
def test_plans_of_real_shapes_are_sound(name: str, ctas: int) -> None:
    config = with_layers(model_config(read_shipped(name)), 2)
    validate(make_plan(config, Limits(ctas=ctas, max_context=8192, num_pages=128)))


def test_eight_sequences_are_sound() -> None:
    validate(plan_of("qwen3", 5, sequences=8, max_context=128))


def column(plan: Plan, kind: Kind, layer: int = 1) -> Any:
    """The records of all CTAs in one phase, as a view."""
    [phase] = [phase.index for phase in plan.phases if phase.kind == kind and phase.layer == layer]
    return plan.tasks[:, phase]


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        (Kind.QKV, "first", 1, "weights"),
        (Kind.QKV, "weights", 1024, "weights"),
        (Kind.QKV, "count", -1, "do not cover"),
        (Kind.GATE_UP, "norm", 4, "norm"),
        (Kind.GATE_UP, "inputs", -4, "inputs"),
        (Kind.DOWN, "k_units", 1, "k_units"),
        (Kind.OUT, "in_phase", -1, "never written|of phase"),
        (Kind.DOWN, "in_phase", 1, "which is of phase .* and not of phase"),
        (Kind.DOWN, "out_word", 2, "out_word"),
        (Kind.ATTENTION, "member", 1, "KV head . has no member"),
        (Kind.COMBINE, "first", 1, "KV head . has no member"),
        (Kind.QKV, "layer", 1, "another phase"),
        (Kind.QKV, "bias", 4, "bias"),
    ],
)
def test_a_fault_in_a_task_is_named(kind: Kind, name: str, change: int, message: str) -> None:
    plan = plan_of("bias", 5)
    tasks = column(plan, kind)
    tasks[name][0] = int(tasks[name][0]) + change
    with pytest.raises(PlanError, match=message):
        validate(plan)


def test_a_hidden_row_with_two_owners_is_refused() -> None:
    plan = plan_of("llama", 3)
    down = column(plan, Kind.DOWN)
    moved = np.roll(down, 1)
    for name in ("first", "count", "weights"):
        down[name] = moved[name]
    with pytest.raises(PlanError, match="owner"):
        validate(plan)


def test_a_cta_that_serves_other_kv_heads_than_its_own_is_refused() -> None:
    plan = plan_of("tied", 2)  # 3 KV heads: CTA 0 serves heads 0 and 2
    column(plan, Kind.ATTENTION)["stride"][0] = 1
    with pytest.raises(PlanError, match=r"KV head . has no member"):
        validate(plan)


def test_a_header_that_does_not_fit_is_refused() -> None:
    for name in ("members", "x_words", "rope", "max_rows", "embedding", "vocab_limit"):
        plan = plan_of("llama", 3)
        plan.header[name] += 1
        with pytest.raises(PlanError, match=name):
            validate(plan)


def test_shared_memory_over_the_limit_is_refused() -> None:
    plan = plan_of("llama", 3)
    with pytest.raises(PlanError, match=r"shared memory of 20000 bytes leaves \d ring stages"):
        validate(replace(plan, limits=replace(plan.limits, shared_bytes=20000)))


def test_two_choosers_are_refused() -> None:
    plan = plan_of("llama", 3)
    plan.tasks["count"][1, -1] = 1
    with pytest.raises(PlanError, match="2 CTAs choose"):
        validate(plan)


# What check_order alone proves, on plans whose records are changed so that nothing else is wrong with them.


def test_a_reader_that_nobody_waits_for_is_overwritten() -> None:
    """down takes only the first inner values: it may publish X while the CTA of the last ones has not taken it."""
    plan = plan_of("llama", 3)
    column(plan, Kind.DOWN)["inputs"] = 4
    with pytest.raises(PlanError, match=r"overwrites word .*, which CTA . may not have taken yet"):
        check_order(plan)


def test_a_word_of_two_writers_is_found() -> None:
    plan = plan_of("llama", 3)
    column(plan, Kind.GATE_UP)["count"][0] += 1
    with pytest.raises(PlanError, match="another task writes too"):
        check_order(plan)


def test_a_word_of_no_writer_is_found_for_the_length_that_needs_it() -> None:
    """Member 1 of a head is left out: short texts do not miss it."""
    plan = plan_of("llama", 5)
    tasks = column(plan, Kind.ATTENTION)
    tasks["count"][tasks["member"] == 1] = 0
    with pytest.raises(PlanError, match=r"takes word .*with 2 chunks"):
        check_order(plan)


def test_buffers_that_share_words_are_found_by_what_is_taken_from_them() -> None:
    plan = plan_of("llama", 3)
    x = int(plan.header["x_word"])
    for layer in range(2):
        column(plan, Kind.GATE_UP, layer)["out_word"] = x
        column(plan, Kind.DOWN, layer)["in_word"] = x
    with pytest.raises(PlanError, match="overwrites word"):
        check_order(plan)


def test_a_cta_whose_work_nobody_needs_is_found() -> None:
    """CTA 2's part of the choice is ignored, so the next token may begin while it still takes the last one's values."""
    plan = plan_of("llama", 3)
    plan.header["ctas"] = 2
    with pytest.raises(PlanError, match="may publish the token before CTA 2 is done"):
        check_order(plan)
