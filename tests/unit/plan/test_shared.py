"""A CTA's shared memory: everything aligned, nothing overlaps, and what is left over is ring."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onekernel.errors import ConfigError
from onekernel.models.registry import model_config
from onekernel.plan.limits import Limits
from onekernel.plan.plan import make_plan
from onekernel.plan.shared import MIN_STAGES, SharedLayout, shared_layout
from onekernel.weights.shipped import read_shipped

BARRIER_BYTES = 16
NEEDS: dict[str, Any] = {
    "phases": 99, "max_inputs": 8192, "most_rows": 168, "max_hidden_rows": 16, "group": 4, "head_dim": 64
}  # fmt: skip


def limits(**changes: Any) -> Limits:
    return Limits(**{"ctas": 132, "max_context": 4096, "num_pages": 64, **changes})


def parts(layout: SharedLayout) -> dict[str, int]:
    """Bytes of each part after the ring."""
    names = [field.name for field in fields(layout)]
    names = names[names.index("ring_bytes") : names.index("total_bytes") + 1]
    offsets = [getattr(layout, name) for name in names]
    assert layout.ring_bytes == offsets[1], "the first part begins where the ring ends"
    return {name: end - start for name, start, end in zip(names[1:], offsets[1:], offsets[2:], strict=False)}


@given(
    st.integers(1, 300),
    st.integers(1, 128),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(1, 16),
    st.sampled_from([16, 64, 80, 96, 100, 128, 256]),
    st.sampled_from([1, 8]),
)
def test_parts_are_aligned_and_large_enough(
    phases: int, inputs: int, rows: int, hidden: int, group: int, head_dim: int, sequences: int
) -> None:
    needs = {"phases": phases, "max_inputs": 64 * inputs, "most_rows": 8 * rows, "max_hidden_rows": 4 * hidden}
    try:
        layout = shared_layout(limits(sequences=sequences), **needs, group=group, head_dim=head_dim)
    except ConfigError:
        assert sequences == 8
        return
    room = parts(layout)
    assert all(size % 16 == 0 and size >= 0 for size in room.values())
    assert room["tasks"] == 64 * phases
    assert room["x"] == sequences * 64 * inputs * 2
    assert room["partial"] >= 16 * sequences * layout.max_rows * 4
    assert room["residual"] == sequences * 4 * hidden * 4
    assert room["heads"] >= (2 * group + 2) * head_dim * 2
    stage = 16384 + BARRIER_BYTES
    assert layout.ring_bytes == layout.stages * stage and layout.stages >= MIN_STAGES
    assert layout.stages % 2 == 0, "halves of the warps take them in turns"
    assert layout.total_bytes <= 232448 < layout.total_bytes + 2 * stage, "another two stages would not fit"


def test_partial_sums_give_way_before_the_ring_does() -> None:
    wide = NEEDS | {"most_rows": 1600}
    roomy = shared_layout(limits(), **wide)
    tight = shared_layout(limits(shared_bytes=roomy.total_bytes - roomy.stages * 16400 + 2 * 16400), **wide)
    assert roomy.max_rows == 1600
    assert tight.max_rows == 8 * 16, "a stage's worth of 8-row tiles, which a run of the kernel cannot go below"
    assert tight.stages >= MIN_STAGES


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    message = r"shared memory of 60000 bytes leaves \d ring stages of 16384 bytes beside \d+ bytes for 1 sequences"
    with pytest.raises(ConfigError, match=message):
        shared_layout(limits(shared_bytes=60000), **NEEDS)
    with pytest.raises(ConfigError, match="8 sequences of 14336 inputs"):
        make_plan(model_config(read_shipped("Llama-3.1-8B")), limits(sequences=8))


def test_a_stage_that_keys_and_values_do_not_fit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"keys and values of 8 tokens of 256 values take .* more than a ring stage of 2048"
    ):
        shared_layout(limits(consumer_warps=2, stage_bytes=2048), **NEEDS | {"head_dim": 256})


def test_more_query_heads_than_the_warps_can_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"68 query heads of 64 values .* take 17 consumer warps or more, not 16"):
        shared_layout(limits(), **NEEDS | {"group": 68})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctas": 0}, "ctas is 0"),
        ({"sequences": 2}, "sequences is 2; a kernel is built for 1 or 8"),
        ({"consumer_warps": 8}, "stage_bytes is 16384; .* of the 8 consumer warps, 8192"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits(**changes)
