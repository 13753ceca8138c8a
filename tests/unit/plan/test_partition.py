"""Shares are whole and nearly equal, on every number of SMs and for shapes nobody has thought of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError
from onekernel.models.registry import model_config, shipped_configs
from onekernel.plan.abi import Kind
from onekernel.plan.layout import TileRows, weight_layout
from onekernel.plan.limits import Limits
from onekernel.plan.partition import make_partition
from onekernel.plan.plan import PRODUCTS, Plan, make_plan
from onekernel.weights.shipped import read_shipped
from tests.unit.plan.models import BASE

SMS = [78, 114, 132, 148, 170]


def shipped(name: str) -> ModelConfig:
    return model_config(read_shipped(name))


DENSE = [name for name in shipped_configs() if shipped(name).ternary is None]


def limits(ctas: int, **changes: Any) -> Limits:
    return Limits(**{"ctas": ctas, "max_context": 4096, "num_pages": 64, **changes})


def waste(plan: Plan) -> float:
    """Bytes of the most loaded CTA over an even share of the weights without any padding."""
    config = plan.config
    matrices = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    needed = 2 * (config.num_hidden_layers * matrices + config.vocab_size * config.hidden_size)
    return float(plan.bytes_per_phase.sum(axis=1).max() * plan.limits.ctas / needed)


@pytest.mark.parametrize("ctas", SMS)
@pytest.mark.parametrize("name", DENSE)
def test_every_cta_reads_almost_the_same(name: str, ctas: int) -> None:
    plan = make_plan(shipped(name), limits(ctas))
    # Reached on 132 SMs: 1.0025 to 1.035, 1B and larger 1.009 at most; elsewhere the worst is 1.109.
    assert plan.imbalance <= (1.036 if ctas == 132 else 1.11)
    if ctas == 132 and plan.bytes_per_token > 2e9:
        assert plan.imbalance <= 1.01
    assert waste(plan) <= waste(make_plan(shipped(name), limits(ctas), tile_rows=8))


@pytest.mark.parametrize("ctas", SMS)
@pytest.mark.parametrize("name", DENSE)
def test_level_shares_make_every_cta_read_the_same_within_half_a_percent(name: str, ctas: int) -> None:
    plan = make_plan(shipped(name), limits(ctas), partition="level", tile_rows=8)
    assert plan.imbalance <= 1.005
    assert waste(plan) <= 1.01  # with the padding of K and rows


@pytest.mark.parametrize("name", DENSE)
def test_no_phase_has_a_cta_with_more_than_an_even_share(name: str) -> None:
    plan = make_plan(shipped(name), limits(132))
    counts = plan.tasks["count"][:, [p.index for p in plan.phases if p.kind in PRODUCTS]].astype(int)
    assert (counts.max(axis=0) == -(-counts.sum(axis=0) // 132)).all()


@pytest.mark.parametrize("ctas", SMS)
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-8B", "SmolLM2-135M"])
def test_99_kb_of_shared_memory_are_enough_with_half_the_warps(name: str, ctas: int) -> None:
    plan = make_plan(shipped(name), limits(ctas, shared_bytes=99 * 1024, consumer_warps=8, stage_bytes=8192))
    assert plan.shared.stages >= 4 and plan.shared.total_bytes <= 99 * 1024


@pytest.mark.parametrize("ctas", SMS)
def test_a_narrow_model_gets_4_row_tiles_where_8_would_waste_more_than_5_percent(ctas: int) -> None:
    config = replace(BASE, hidden_size=256, intermediate_size=768, vocab_size=1000, num_hidden_layers=8)
    with_8, chosen = make_plan(config, limits(ctas), tile_rows=8), make_plan(config, limits(ctas))
    if waste(with_8) <= 1.05:
        assert chosen.layout.tile_rows == TileRows()
    else:
        assert chosen.layout.tile_rows.residual == 4
        assert waste(chosen) < waste(with_8)
    assert waste(make_plan(config, limits(170), tile_rows=8)) > 1.05, "or this test shows nothing"


def test_level_shares_are_level_in_every_layer_not_only_over_the_token() -> None:
    """The ring holds 11 stages of 16 KiB: what a CTA is ahead or behind within a layer must fit it."""
    plan = make_plan(shipped("Llama-3.2-1B"), limits(132), partition="level")
    per_layer = plan.bytes_per_phase[:, 1:-2].reshape(132, 16, 6).sum(axis=2)
    behind = np.cumsum(per_layer, axis=1) - np.cumsum(per_layer.mean(axis=0))
    assert np.abs(behind).max() <= 6 * 16384


def test_head_shares_follow_the_design() -> None:
    heads = make_partition(shipped("Llama-3.2-1B"), weight_layout(BASE, TileRows(), context_tokens=1), 132).heads
    assert heads.first[:128].tolist() == [head for head in range(8) for _ in range(16)]
    assert heads.member[:128].tolist() == list(range(16)) * 8
    assert heads.count.tolist() == [1] * 128 + [0] * 4
    many = replace(BASE, num_attention_heads=20, num_key_value_heads=20)
    few = make_partition(many, weight_layout(many, TileRows(), context_tokens=1), 8).heads
    assert (few.stride, few.first.tolist(), few.count.tolist()) == (8, list(range(8)), [3] * 4 + [2] * 4)


@settings(max_examples=60)
@given(
    st.builds(
        lambda hidden, inner, kv, group, head, vocab, layers: replace(
            BASE,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=kv * group,
            num_key_value_heads=kv,
            head_dim=4 * head,
            vocab_size=vocab,
            num_hidden_layers=layers,
        ),
        hidden=st.integers(1, 700),
        inner=st.integers(1, 900),
        kv=st.integers(1, 9),
        group=st.integers(1, 8),
        head=st.integers(1, 64),
        vocab=st.integers(1, 3000),
        layers=st.integers(1, 3),
    ),
    st.integers(1, 170),
    st.sampled_from(["balanced", "level"]),
    st.sampled_from(["auto", 4, 8]),
)
def test_any_shape_is_shared_out_completely(config: ModelConfig, ctas: int, strategy: Any, tile_rows: Any) -> None:
    plan = make_plan(config, limits(ctas), partition=strategy, tile_rows=tile_rows)
    for phase in plan.phases:
        tasks = plan.tasks[:, phase.index]
        if phase.kind in PRODUCTS or phase.kind == Kind.EMBED:
            kind = "out" if phase.kind == Kind.EMBED else phase.kind.name.lower()
            tiles = plan.layout.matrices[kind, phase.layer].row_tiles  # type: ignore[index]
            owned = [np.arange(task["first"], task["first"] + task["count"]) for task in tasks]
            assert sorted(np.concatenate(owned).tolist()) == list(range(tiles))
    assert plan.bytes_per_token == plan.layout.bytes_per_token


def test_an_order_moves_shares_between_ctas() -> None:
    config, order = replace(BASE, hidden_size=136), [2, 0, 3, 1]
    layout = weight_layout(config, TileRows(), context_tokens=1)
    plain, moved = make_partition(config, layout, 4), make_partition(config, layout, 4, order=order)
    for key, share in plain.products.items():
        assert moved.products[key].first[order].tolist() == share.first.tolist()
        assert moved.products[key].count[order].tolist() == share.count.tolist()
    assert moved.heads.first[order].tolist() == plain.heads.first.tolist()
    with pytest.raises(ConfigError, match="not a permutation of 0 to 3"):
        make_partition(config, layout, 4, order=[0, 1, 2, 2])


def test_a_strategy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    layout = weight_layout(BASE, TileRows(), context_tokens=1)
    with pytest.raises(ConfigError, match="partition is 'even'; it must be balanced or level"):
        make_partition(BASE, layout, 4, "even")  # type: ignore[arg-type]
