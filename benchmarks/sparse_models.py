"""Whole models with sparse feed-forwards beside the same models without: the body, no head, as published."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.ledger import Job
from benchmarks.sparse_llama import Sizes, SparseLlama
from benchmarks.sparse_patterns import Pattern, skew
from benchmarks.sparse_timing import CHECKED_TOKENS, Scale, error, finish, per_token, time_us
from onekernel.measure.results import spread
from onekernel.ops.sparse_module import replace_ffn


@torch.no_grad()
def patterned_model(sizes: Sizes, pattern: Pattern, device: str) -> SparseLlama:
    """Return a random model whose feed-forwards meet the pattern at every layer.

    Two channels of the embedding carry the pattern's offsets (a token's by its id), and no layer writes to them; what
    layers write to the others is small, so that the norm leaves them as they are.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = SparseLlama(sizes).bfloat16().eval()
    model.rope = model.rope.float()
    model.embed.weight.normal_()
    model.embed.weight[:, -2] = 1.0
    model.embed.weight[:, -1] = pattern.tokens[: sizes.vocab].to(device)
    for layer in model.layers:
        for name, matrix in layer.named_parameters():
            if matrix.ndim > 1:
                matrix.normal_(std=matrix.shape[1] ** -0.5)
            if name in ("out.weight", "mlp.down_proj.weight"):
                matrix.mul_(0.02)
                matrix[-2:] = 0.0
        order = torch.randperm(sizes.inner)
        layer.mlp.gate_proj.weight[:, -2] = pattern.neurons[order].to(device)
        layer.mlp.gate_proj.weight[:, -1] = 1.0
    return model


def model_jobs(scale: Scale, counter: Callable[[], float] | None) -> Iterator[Job]:
    """Yield the measurements of whole models."""

    def of(name: str, sizes: Sizes, fraction: float) -> dict[str, Any]:
        about = {"kind": "model", "model": name, "asked_fraction": fraction}
        return about | model_row(scale, sizes, fraction, counter)

    for name, sizes in scale.models.items():
        for fraction in scale.fractions[:2]:
            yield f"the {name} model, {fraction}", partial(of, name, sizes, fraction)


@torch.inference_mode()
def model_row(scale: Scale, sizes: Sizes, fraction: float, counter: Callable[[], float] | None) -> dict[str, Any]:
    pattern = skew(fraction, 0, sizes.vocab, sizes.inner)
    model = patterned_model(sizes, pattern, scale.device)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, sizes.vocab, scale.batch, generator=draw).to(scale.device)

    def forward() -> torch.Tensor:
        out: torch.Tensor = model(ids)
        return out

    repeats = max(scale.repeats // 3, 2)
    want = model(ids)
    eager = spread([time_us(forward, scale.device) for _ in range(repeats)])
    eager_mj = per_token(scale, counter, forward, eager["median"], ids.numel())
    replaced = replace_ffn(model)
    for _ in range(3):
        model(ids)
        finish(scale.device)
    us = spread([time_us(forward, scale.device) for _ in range(repeats)])
    layers = [layer.measured for layer in replaced.report() if layer.measured is not None]
    return {
        "pattern": pattern.name,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "tokens": ids.numel(),
        "nonzero_fraction": statistics.mean(layer.nonzero_fraction for layer in layers),
        "us": us,
        "dense_us": eager,
        "dense": "eager",
        "speedup": eager["median"] / us["median"],
        "relative_error": error(model(ids).flatten(0, 1), want.flatten(0, 1)[:CHECKED_TOKENS]),
        "route": ", ".join(sorted({layer.route.name for layer in layers})),
        "mj_per_token": per_token(scale, counter, forward, us["median"], ids.numel()),
        "dense_mj_per_token": eager_mj,
    }
