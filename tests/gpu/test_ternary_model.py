"""Ternary models on a real GPU: the operators in the place of the reference, from two bits a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.engine.ternary import OperatorMatrix, place_on
from onekernel.models.model import Model, Place
from onekernel.models.registry import model_config
from onekernel.models.ternary import load_ternary
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.int8_rows import quantise_rows
from onekernel.weights.ternary.matrix import TernaryMatrix
from tests import ternary_models as models
from tests.ternary_models import BITNET, FIRST, LLAMA, QWEN

pytestmark = pytest.mark.timeout(300)

GPU = "cuda:0"


def load(source: Path, device: str) -> Model:
    checkpoint = open_checkpoint(str(source))
    config = model_config(checkpoint.settings.config)
    weights = load_ternary(
        checkpoint,
        config,
        dtype=torch.float32,
        device=device,
        progress=lambda done, total: None,
        place=place_on(device),
    )
    return Model(config, weights)


def logits(model: Model, tokens: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    device = str(model.device)
    cache = KVCache.allocate(model.config, 1, model.dtype, device)
    rope, rows, start = rope_table(model.config, 64).to(device), [], 0
    for size in chunks:
        rows.append(model.logits(tokens[start : start + size], Place(cache, torch.tensor([0]), rope, start)).cpu())
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 17, 100, 512])
def test_products_have_the_reference_s_bits(group: int | None, tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    codes = torch.randint(-1, 2, (700, 2560), generator=draw, dtype=torch.int8)
    scales = torch.rand((3,) if group is None else (700, 2560 // group), generator=draw) + 0.5
    matrix = TernaryMatrix(codes, scales, (500, 120, 80) if group is None else (), group)
    on_gpu = TernaryMatrix(codes.to(GPU), scales.to(GPU), matrix.rows, group)
    x, norm = torch.randn(tokens, 2560, generator=draw), torch.rand(2560, generator=draw) + 0.5
    ours, theirs = OperatorMatrix.pack(on_gpu), TernaryReference(matrix)
    assert torch.equal(ours.linear(x.to(GPU)).cpu(), theirs.linear(x))
    assert torch.equal(ours.normed_linear(x.to(GPU), norm.to(GPU), 1e-5).cpu(), theirs.normed_linear(x, norm, 1e-5))


@pytest.mark.parametrize("config", [BITNET, LLAMA, FIRST, QWEN], ids=["bitnet", "llama", "first", "qwen"])
def test_logits_are_those_of_the_cpu(config: dict[str, Any], tmp_path: Path) -> None:
    if config is FIRST:
        models.write_masters(tmp_path, models.make(config))
    else:
        models.write_packed(tmp_path, models.make(config))
    tokens = list(range(5, 45))
    got, want = (logits(load(tmp_path, device), tokens, (30, 1, 1, 8)) for device in (GPU, "cpu"))
    assert (got - want).norm() < 5e-2 * want.norm()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


def test_an_int8_head_is_the_same_on_a_gpu() -> None:
    draw = torch.Generator().manual_seed(0)
    values, scales = quantise_rows(torch.randn(4096, 512, generator=draw))
    x = torch.randn(3, 512, generator=draw)
    got = Int8Rows(values.to(GPU), scales.to(GPU)).linear(x.to(GPU)).cpu()
    assert (got - Int8Rows(values, scales).linear(x)).norm() < 1e-5 * got.norm()


def test_2b_4t_takes_the_memory_of_one_packed_copy_and_generates() -> None:
    """Random weights in its shape: 0.52 GB of projections, 0.66 GB of embedding, and the cache."""
    before = torch.cuda.memory_allocated(GPU)
    with LLM("bitnet-b1.58-2B-4T", load_format="dummy", device=GPU, max_context=2048) as llm:
        held = torch.cuda.memory_allocated(GPU) - before
        assert held < 1.4e9 + 2048 * 76_800
        params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
        first, second = (llm.generate(list(range(100)), params) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(set(first.token_ids)) > 8
