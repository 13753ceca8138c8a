"""Memory is planned before it is allocated, and too little of it gives numbers and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel import LLM
from onekernel.config import ModelConfig
from onekernel.engine.kv_size import describe, kv_pages, with_pages
from onekernel.engine.memory import check_memory, format_bytes, plan_memory
from onekernel.errors import ConfigError, MemoryLimitError
from onekernel.plan.limits import Limits
from onekernel.plan.plan import make_plan
from tests.tiny_llama import write_tiny

CONFIG = ModelConfig("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152, 8192, tie_word_embeddings=True)


@pytest.mark.complaint(
    "C1", file="engine/memory.py", old="(pages or pages_for(context)) * PAGE_TOKENS", new="2 * context"
)
def test_needs_are_what_this_model_and_this_context_take() -> None:
    plan = plan_memory(CONFIG, torch.bfloat16, "cuda", 1000)
    assert plan.weights_bytes == 2 * 134_515_008
    assert plan.kv_bytes == 1024 * 2 * 30 * 3 * 64 * 2  # whole pages of 64
    assert plan.total_bytes == plan.weights_bytes + plan.kv_bytes + plan.workspace_bytes


@pytest.mark.complaint("C2", file="engine/memory.py", old="largest = one * PAGE_TOKENS", new="largest = context")
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


@pytest.mark.parametrize(
    ("asked", "spare", "pages"),
    [
        (None, 10**9, 64),  # four contexts of 16 pages
        (None, 40 * 100, 36),  # half of what is free
        (None, 0, 16),
        (None, -5, 16),
        (0, 10**9, 16),
        (1000, 0, 16),
        (5000, 0, 79),
    ],
)
def test_the_cache_has_four_contexts_or_what_half_of_the_rest_allows_or_what_is_asked(
    asked: int | None, spare: int, pages: int
) -> None:
    assert kv_pages(asked, 1000, 100, spare) == pages


def test_a_cache_of_less_than_a_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_tokens is 999, less than one context of 1000"):
        kv_pages(999, 1000, 100, 10**9)


def test_more_sequences_than_fit_name_the_flag_for_them() -> None:
    one = plan_memory(CONFIG, torch.bfloat16, "cpu", 8192)
    assert plan_memory(CONFIG, torch.bfloat16, "cpu", 8192, pages=256).kv_bytes == 2 * one.kv_bytes
    with pytest.raises(MemoryLimitError, match=r"for 16384 tokens.*one context of 8192 tokens fits.*--kv-tokens"):
        check_memory(CONFIG, torch.bfloat16, "cpu", 8192, one.total_bytes, pages=256)


def test_what_the_cache_holds_is_told_in_tokens_and_contexts() -> None:
    assert describe(16, 1000) == ""
    assert describe(64, 1000) == " (4096 tokens, 4 contexts)"
    assert describe(40, 1000) == " (2560 tokens, 2.5 contexts)"


def test_a_plan_for_more_pages_differs_in_nothing_else() -> None:
    limits = Limits(ctas=4, max_context=1000, num_pages=16)
    small = make_plan(CONFIG, limits)
    large = with_pages(small, 64)
    assert (int(large.header["num_pages"]), large.limits.num_pages) == (64, 64)
    assert (int(small.header["num_pages"]), small.limits.num_pages) == (16, 16)
    made = make_plan(CONFIG, Limits(ctas=4, max_context=1000, num_pages=64))
    assert made.header.tobytes() == large.header.tobytes() and made.tasks.tobytes() == large.tasks.tobytes()


def test_a_model_that_cannot_fit_is_refused_before_anything_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A placeholder for a million words takes seconds, and this tokenizer is damaged."""
    write_tiny(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr("onekernel.engine.load.free_memory", lambda device: 1000)
    with pytest.raises(MemoryLimitError, match="1 kB are free"):
        LLM(str(tmp_path), device="cpu", load_format="dummy")
