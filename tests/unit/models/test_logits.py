"""The PyTorch reference against transformers, one small random model of every architecture."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.config import PAGE_TOKENS, ModelConfig
from onekernel.models.load import load_weights
from onekernel.models.model import Model, Place
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.weights.open import open_checkpoint
from tests import oracle

pytestmark = pytest.mark.xdist_group("transformers")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = open_checkpoint(str(folder))
    config = model_config(checkpoint.settings.config)
    return Model(config, load_weights(checkpoint, config, dtype=dtype, device="cpu", progress=lambda done, total: None))


def place(model: Model, tokens: int, start: int = 0, total: int | None = None) -> Place:
    """Pages in a scattered order, poisoned, so that a read of a slot nobody wrote shows."""
    pages = -(-tokens // PAGE_TOKENS) + 2
    cache = KVCache.allocate(model.config, pages, model.dtype, "cpu")
    cache.pages.fill_(float("nan"))
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    return Place(cache, table, rope_table(model.config, total or tokens), start)


def run(model: Model, ids: list[int], chunks: list[int], total: int | None = None) -> torch.Tensor:
    """Return the logits of all tokens, fed in pieces of the given lengths."""
    at = place(model, len(ids), total=total)
    rows, start = [], 0
    for size in itertools.chain(chunks, itertools.repeat(1)):
        if start >= len(ids):
            return torch.cat(rows)
        piece = ids[start : start + size]
        rows.append(model.logits(piece, Place(at.cache, at.page_table, at.rope, start)))
        start += len(piece)
    raise AssertionError


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def tokens(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", oracle.MODELS)
def test_float32_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle.make(name, tmp_path)
    ours = load(tmp_path)
    ids = tokens(ours.config, 150)
    want = oracle.logits(theirs, ids)
    assert relative(run(ours, ids, [70, 1, 1, 60]), want) < 1e-4
    assert relative(run(ours, ids, [150]), want) < 1e-4


def test_dynamic_rope_is_fixed_at_the_longest_the_request_may_become(tmp_path: Path) -> None:
    theirs = oracle.make("llama-dynamic", tmp_path)
    ours = load(tmp_path)
    ids = tokens(ours.config, 400)  # beyond max_position_embeddings, where transformers stretches for 400
    want = oracle.logits(theirs, ids)
    assert relative(run(ours, ids, [200, 200]), want) < 1e-4
    assert relative(run(ours, ids, [200, 200], total=512), want) > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_stays_as_close_to_float32_as_transformers_does(name: str, tmp_path: Path) -> None:
    theirs = oracle.make(name, tmp_path)
    exact_weights = theirs.to(torch.bfloat16).to(torch.float32)
    ours = load(tmp_path, torch.bfloat16)
    ids = tokens(ours.config, 40)
    exact = oracle.logits(exact_weights, ids)
    rounded = oracle.logits(theirs.to(torch.bfloat16), ids)
    theirs_error = (rounded - exact).norm() / exact.norm()
    for chunks in ([40], []):
        assert (run(ours, ids, chunks) - exact).norm() / exact.norm() < 1.5 * theirs_error


def test_stopping_after_each_phase_gives_the_shapes_the_phases_promise(tmp_path: Path) -> None:
    oracle.make("qwen3", tmp_path)
    model = load(tmp_path)
    config, count = model.config, 5
    acts = model.start(tokens(config, count))
    at = place(model, count)
    seen: dict[str, Any] = {}
    for phase in model.phases:
        model.run(phase, acts, at)
        seen[phase.name] = {
            "embed": acts.residual,
            "qkv": acts.qkv,
            "attention": acts.mixed,
            "out": acts.residual,
            "gate_up": acts.inner,
            "down": acts.residual,
            "head": acts.logits,
        }[phase.name].shape[1]
    assert seen == {
        "embed": config.hidden_size,
        "qkv": config.q_size + 2 * config.kv_size,
        "attention": config.q_size,
        "out": config.hidden_size,
        "gate_up": config.intermediate_size,
        "down": config.hidden_size,
        "head": config.vocab_size,
    }
