"""How many stages of weights are on their way is chosen by how large a layer is."""

from __future__ import annotations

import pytest

from onekernel.engine.megakernel import Windows
from onekernel.engine.megakernel_load import first_plan
from onekernel.models.registry import model_config
from onekernel.plan.limits import Limits
from onekernel.weights.shipped import read_shipped


@pytest.mark.parametrize(
    ("model", "short", "warps"), [("Llama-3.2-1B", 2, 16), ("Qwen3-0.6B", 1, 16), ("SmolLM2-135M", 1, 12)]
)
def test_small_layers_have_one_stage_on_its_way_and_the_smallest_fewer_warps(
    model: str, short: int, warps: int
) -> None:
    limits = Limits(ctas=132, max_context=512, num_pages=8)
    plan = first_plan(model_config(read_shipped(model)), limits, "sm_90a")
    assert Windows.of(plan) == Windows(short=short)
    assert plan.limits.consumer_warps == warps
