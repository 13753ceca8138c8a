"""The predicted time of a token: closed forms at the ends, the right direction between them, and what was measured."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.config import PAGE_TOKENS
from onekernel.engine.megakernel_load import first_plan
from onekernel.models.registry import model_config
from onekernel.plan.chunks import most_tokens
from onekernel.plan.limits import Limits
from onekernel.plan.plan import Plan, make_plan
from onekernel.plan.prediction import H200, Speeds, predict_us
from onekernel.weights.shipped import read_shipped
from tests.unit.plan.models import CONFIGS

RESULTS = Path(__file__).resolve().parents[3] / "results" / "decode.json"
ENDLESS = 1e15
CTAS, LAYERS, HEAD_BYTES = 4, 2, 4 * 16
"""Of the tiny plan, whose two KV heads have two members each."""
LENGTH = 600
"""Three blocks of 256 tokens, of which the first member has 256 and 88."""


def tiny_plan(shared_bytes: int = 232448) -> Plan:
    limits = Limits(ctas=CTAS, max_context=1024, num_pages=16, shared_bytes=shared_bytes)
    return make_plan(CONFIGS["llama"], limits)


def big_plan(model: str, context: int) -> Plan:
    limits = Limits(ctas=132, max_context=context, num_pages=-(-context // PAGE_TOKENS))
    return first_plan(model_config(read_shipped(model)), limits, "sm_90a")


@pytest.fixture(scope="module", name="plan")
def one_billion() -> Plan:
    return big_plan("Llama-3.2-1B", 2048)


def waits_us(speeds: Speeds, tokens: int, members: int) -> float:
    """Four phases of a layer, the head and the choice wait for a hand-over, attention and combine for more."""
    layer = 4 * speeds.hand_over_us + speeds.attention_us + tokens * HEAD_BYTES / (speeds.attention_gbps * 1e3)
    return LAYERS * (layer + (speeds.combine_us if members > 1 else 0.0)) + 2 * speeds.hand_over_us


@pytest.mark.parametrize(("position", "tokens", "members"), [(0, 1, 1), (255, 256, 1), (LENGTH - 1, 256 + 88, 2)])
def test_with_endless_memory_a_token_is_its_waits_and_what_consumers_take(
    position: int, tokens: int, members: int
) -> None:
    plan, speeds = tiny_plan(), replace(H200, read_gbps=ENDLESS)
    most = int(plan.bytes_per_phase.sum(axis=1).max())
    expected = waits_us(speeds, tokens, members) + most / (speeds.take_gbps * 1e3 / CTAS)
    assert predict_us(plan, position, speeds) == pytest.approx(expected)


def test_with_slow_memory_it_is_the_only_limit() -> None:
    plan, speeds = tiny_plan(), replace(H200, read_gbps=0.01)
    most = int(plan.bytes_per_phase.sum(axis=1).max())
    assert predict_us(plan, 100, speeds) == pytest.approx(most / (0.01 * 1e3 / CTAS))


def test_what_does_not_fit_the_ring_waits_for_memory_after_the_hand_over(plan: Plan) -> None:
    hand_over, rate = 30.0, H200.read_gbps * 1e3 / plan.limits.ctas
    speeds = replace(H200, take_gbps=ENDLESS, hand_over_us=hand_over, attention_us=hand_over, attention_gbps=ENDLESS)
    per_cta = plan.bytes_per_phase
    reads = per_cta.max(axis=0) * (per_cta.sum(axis=1).max() / per_cta.max(axis=0).sum())
    waiting = sum(max(0.0, read - plan.shared.ring_bytes) / rate for read in reads)
    assert waiting > 100, "some phases are larger than the ring, which is full before each of them"
    assert predict_us(plan, 100, speeds) == pytest.approx(plan.hand_overs * hand_over + waiting)


@given(
    st.sampled_from([field.name for field in fields(Speeds)]),
    st.floats(0.2, 5.0),
    st.floats(1.0, 3.0),
    st.integers(0, 2047),
)
def test_no_better_speed_makes_a_token_slower(
    plan: Plan, name: str, scale: float, factor: float, position: int
) -> None:
    speeds = replace(H200, **{name: getattr(H200, name) * scale})
    better = factor if name.endswith("gbps") else 1 / factor
    faster = replace(speeds, **{name: getattr(speeds, name) * better})
    assert predict_us(plan, position, faster) <= predict_us(plan, position, speeds) * (1 + 1e-9)


SMALL, LARGE = tiny_plan(120_000), tiny_plan()


@given(st.integers(0, 1022), st.floats(0.01, 100.0))
def test_a_later_token_and_a_smaller_ring_are_never_faster(position: int, read_gbps: float) -> None:
    speeds = replace(H200, read_gbps=read_gbps)
    assert SMALL.shared.ring_bytes < LARGE.shared.ring_bytes
    here = predict_us(LARGE, position, speeds)
    if LARGE.block_pages_after(position + 1) == LARGE.block_pages_after(position + 2):
        assert here <= predict_us(LARGE, position + 1, speeds) * (1 + 1e-9)
    assert here <= predict_us(SMALL, position, speeds) * (1 + 1e-9)


@given(st.integers(1, 20_000), st.integers(1, 20), st.integers(1, 4))
def test_the_busiest_member_is_found(length: int, members: int, block_pages: int) -> None:
    block = PAGE_TOKENS * block_pages
    tokens = [0] * members
    for start in range(0, length, block):
        tokens[start // block % members] += min(block, length - start)
    assert most_tokens(length, members, block_pages) == max(tokens)


def test_measured_times_are_predicted_within_a_tenth() -> None:
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["backend"] == "megakernel"]
    assert rows
    for row in rows:
        plan = big_plan(row["model"], row["context_tokens"])
        position = row["prompt_tokens"] + (row["new_tokens"] - 1) // 2
        measured = row["us_per_token"]["median"]
        assert predict_us(plan, position, H200) == pytest.approx(measured, rel=0.1), (row["model"], position)
