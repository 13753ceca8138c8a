"""Plans of the tiny models on a few CTAs, interpreted after a prefill by the reference, and what they should give."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import torch

from onekernel.config import ModelConfig
from onekernel.models.model import LayerWeights, Model, ModelWeights, Place
from onekernel.models.packed import PackedModel, pack
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.plan.interpreter import Answer, interpret
from onekernel.plan.limits import Limits
from onekernel.plan.plan import Plan, make_plan
from tests.unit.plan.models import CONFIGS, random_weights

CONTEXT = 320
PAGES = 44


def limits(config: ModelConfig, ctas: int, **changes: Any) -> Limits:
    """Blocks of one page, so that short texts have several; warps as few as the head allows."""
    warps = 16 if config.head_dim > 128 else 8
    values = {"ctas": ctas, "max_context": CONTEXT, "num_pages": PAGES, "block_pages": 1, "consumer_warps": warps}
    return Limits(**{**values, "stage_bytes": warps * 1024, **changes})


def plan_of(name: str, ctas: int, **options: Any) -> Plan:
    config = CONFIGS[name]
    changes = {key: options.pop(key) for key in ("sequences", "block_pages", "max_context") if key in options}
    return make_plan(config, limits(config, ctas, **changes), **options)


def prompt_of(name: str, tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{name} {seed}")
    return [draw.randrange(CONFIGS[name].vocab_size) for _ in range(tokens)]


def in_float32(weights: ModelWeights) -> ModelWeights:
    """The same values in float32, for a reference without rounding."""
    layers = tuple(
        LayerWeights(**{f.name: None if (v := getattr(layer, f.name)) is None else v.float() for f in fields(layer)})
        for layer in weights.layers
    )
    return ModelWeights(weights.embedding.float(), layers, weights.final_norm, weights.head.float())


class Run:
    """A plan, its packed weights, and caches that the reference has filled for every prompt but its last token."""

    def __init__(self, plan: Plan, prompts: list[list[int]], packed: PackedModel | None = None) -> None:
        self.plan, self.prompts, config = plan, prompts, plan.config
        self.weights = random_weights(config)
        self.packed = packed or pack(self.weights, config, plan.layout)
        self.rope = rope_table(config, CONTEXT)
        cache = KVCache.allocate(config, PAGES, torch.bfloat16, "cpu")
        cache.pages.fill_(float("nan"))
        self.pages = cache.pages
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))
        self.page_table = pages[: len(prompts) * plan.limits.table_pages].view(len(prompts), -1)
        for prompt, table in zip(prompts, self.page_table, strict=True):
            if len(prompt) == 1:
                continue
            Model(config, self.weights).extend(prompt[:-1], Place(cache, table, self.rope, 0))

    def interpret(self, plan: Plan | None = None, **options: Any) -> Answer:
        """Interpret this plan, or another one, on a copy of the caches."""
        last, positions = [prompt[-1] for prompt in self.prompts], [len(prompt) - 1 for prompt in self.prompts]
        pages = self.pages.clone()
        return interpret(plan or self.plan, self.packed, pages, self.page_table, last, positions, **options)

    def reference(self, sequence: int, answer: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        """The reference's logits (tokens, vocab) along an answer; bf16 rounds each phase, token by token."""
        config, prompt = self.plan.config, self.prompts[sequence]
        model = Model(config, self.weights if dtype is torch.bfloat16 else in_float32(self.weights))
        cache = KVCache.allocate(config, self.plan.limits.table_pages, dtype, "cpu")
        table = torch.arange(self.plan.limits.table_pages)
        if len(prompt) > 1:
            model.extend(prompt[:-1], Place(cache, table, self.rope, 0))
        ids = [prompt[-1], *answer[:-1]]
        rows = [
            model.logits([token], Place(cache, table, self.rope, len(prompt) - 1 + i)) for i, token in enumerate(ids)
        ]
        return torch.cat(rows)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, num_hidden_layers=layers)
