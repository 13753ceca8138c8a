"""Memory is planned before it is allocated, and too little of it gives numbers and a way out."""

from __future__ import annotations

import pytest
import torch

from onekernel.config import ModelConfig
from onekernel.engine.memory import check_memory, format_bytes, plan_memory
from onekernel.errors import MemoryLimitError

CONFIG = ModelConfig("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152, 8192, tie_word_embeddings=True)


@pytest.mark.complaint("C1", file="engine/memory.py", old="pages_for(context) * PAGE_TOKENS", new="2 * context")
def test_needs_are_what_this_model_and_this_context_take() -> None:
    plan = plan_memory(CONFIG, torch.bfloat16, "cuda", 1000)
    assert plan.weights_bytes == 2 * 134_515_008
    assert plan.kv_bytes == 1024 * 2 * 30 * 3 * 64 * 2  # whole pages of 64
    assert plan.total_bytes == plan.weights_bytes + plan.kv_bytes + plan.workspace_bytes


@pytest.mark.complaint("C2", file="engine/memory.py", old="largest = pages * PAGE_TOKENS", new="largest = context")
def test_too_little_memory_names_needs_free_largest_context_and_flag() -> None:
    full = plan_memory(CONFIG, torch.bfloat16, "cpu", 8192)
    free = full.total_bytes - full.kv_bytes // 2
    with pytest.raises(MemoryLimitError, match="--ctx-size") as caught:
        check_memory(CONFIG, torch.bfloat16, "cpu", 8192, free)
    error = caught.value
    assert error.needed_bytes == full.total_bytes and error.free_bytes == free
    assert 0 < error.largest_context < 8192
    assert plan_memory(CONFIG, torch.bfloat16, "cpu", error.largest_context).total_bytes <= free
    assert check_memory(CONFIG, torch.bfloat16, "cpu", error.largest_context, free)
    for part in (format_bytes(full.total_bytes), format_bytes(free), str(error.largest_context)):
        assert part in str(error)


def test_a_model_that_does_not_fit_at_all_says_so() -> None:
    with pytest.raises(MemoryLimitError, match="not even a short context"):
        check_memory(CONFIG, torch.bfloat16, "cpu", 8192, 1_000_000)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (269_030_016, "269 MB"), (2_470_000_000, "2.47 GB"), (15e9, "15 GB")],
)
def test_bytes_are_written_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(int(count)) == text
