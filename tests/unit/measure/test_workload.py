"""What a benchmark times: names, prompt lengths and order as llama-bench has them."""

from __future__ import annotations

import pytest

from onekernel.errors import ConfigError
from onekernel.measure.workload import Workload, plan_workloads


@pytest.mark.parametrize(
    ("workload", "name", "prompt_tokens", "context"),
    [
        (Workload(512, 0), "pp512", 512, 513),
        (Workload(0, 128), "tg128", 1, 129),
        (Workload(512, 128), "pp512+tg128", 513, 641),
        (Workload(512, 0, 4096), "pp512 @ d4096", 4608, 4609),
        (Workload(0, 128, 100), "tg128 @ d100", 101, 229),
    ],
)
def test_names_and_lengths(workload: Workload, name: str, prompt_tokens: int, context: int) -> None:
    assert (workload.name, workload.prompt_tokens, workload.context) == (name, prompt_tokens, context)


def test_the_order_is_depth_then_prompts_answers_pairs() -> None:
    names = [workload.name for workload in plan_workloads([512, 0, 64], [128], [(32, 8)], [0, 1024])]
    first = ["pp512", "pp64", "tg128", "pp32+tg8"]
    assert names == [*first, *(f"{name} @ d1024" for name in first)]


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left to time"):
        plan_workloads([0], [0], [], [0])


def test_a_prompt_at_a_depth_inside_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="--n-depth is 100; with a prompt it must be a multiple of 512"):
        Workload(512, 0, 100)
