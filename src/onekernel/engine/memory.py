"""What a model and a context need, known before anything is allocated."""

from __future__ import annotations

import torch

from onekernel.config import PAGE_TOKENS, PREFILL_CHUNK_TOKENS, ModelConfig
from onekernel.device.host import available_memory_bytes
from onekernel.engine import ternary_prefill
from onekernel.engine.backend import MemoryReport
from onekernel.engine.packed_prefill import CHUNK_TOKENS, why_not, workspace_bytes
from onekernel.errors import MemoryLimitError
from onekernel.models.packed_weights import scratch_bytes
from onekernel.models.sizes import weight_bytes
from onekernel.plan.plan import Plan
from onekernel.weights.arena import LAYER_MATRICES

_PACKING = 7
"""Copies of a ternary matrix, a byte a code, that are there at once while it is packed."""


def pages_for(tokens: int) -> int:
    """Return the pages that hold this many positions."""
    return -(-tokens // PAGE_TOKENS)


def plan_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    context: int,
    plan: Plan | None = None,
    pages: int | None = None,
) -> MemoryReport:
    """Return the bytes of weights, of a KV cache, and of the largest forward pass of a sequence of `context` tokens.

    pages: of the KV cache; None: those of one context. With a plan of the megakernel the weights are its two arenas,
    and the workspace holds what prefill needs (the kernels' activations, or a forward pass with an unpacked layer) and
    the exchange, or, if that takes more, what is on its way while the weights are packed.
    """
    element = dtype.itemsize
    kv_bytes = (pages or pages_for(context)) * PAGE_TOKENS * config.kv_bytes_per_token(element)
    chunk = min(PREFILL_CHUNK_TOKENS, context)
    widest = 3 * config.hidden_size + 2 * config.q_size + 4 * config.kv_size + 3 * config.intermediate_size
    workspace = 4 * (chunk * widest + 2 * config.vocab_size)
    # Gathered keys and values of one layer in float32, and the attention mask or scores beside them.
    workspace += context * (2 * config.kv_size * 4 + chunk * 4)
    if dtype is not torch.float32 and not device.startswith("cuda"):
        workspace += 4 * config.hidden_size * 2 * config.intermediate_size  # one matrix expanded for prefill
    if plan is None:
        return MemoryReport(weight_bytes(config, element, device), kv_bytes, workspace)
    layout, layer = plan.layout, scratch_bytes(plan.layout)
    constants = layout.constants.rope + context * config.head_dim  # the RoPE table is the last of them
    if config.ternary is None:
        padded = layout.head.total_bytes > 2 * config.vocab_size * config.hidden_size
        in_flight = max(
            2 * layer, (1 + padded) * layout.head.total_bytes
        )  # a tensor, and once more if it is rearranged
        if why_not(config, layout, plan.limits.shared_bytes) is None:
            prefill = workspace_bytes(config, layout, min(CHUNK_TOKENS, context))
        else:
            prefill = workspace + layer
    else:
        codes = [layout.matrices[kind, 0].rows * layout.matrices[kind, 0].columns for kind in LAYER_MATRICES]
        in_flight = sum(codes) + _PACKING * max(codes)
        prefill = workspace
        if ternary_prefill.why_not(config, layout, plan.limits.shared_bytes) is None:
            prefill = ternary_prefill.workspace_bytes(config, min(ternary_prefill.CHUNK_TOKENS, context))
    decode = 8 * plan.exchange_words + plan.choice_bytes
    workspace = max(prefill + decode, in_flight - kv_bytes)  # loaded before there is a cache
    return MemoryReport(layout.total_bytes + 4 * constants, kv_bytes, workspace)


def free_memory(device: str) -> int:
    """Return the bytes that can be allocated on `device` now."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return available_memory_bytes()


def check_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    context: int,
    free: int,
    plan: Plan | None = None,
    pages: int | None = None,
) -> MemoryReport:
    """Return the needs if they fit `free` bytes; else raise MemoryLimitError with the largest context that does."""
    needs = plan_memory(config, dtype, device, context, plan, pages)
    if needs.total_bytes <= free:
        return needs
    pages = pages or pages_for(context)
    one = pages_for(context)
    while one and plan_memory(config, dtype, device, one * PAGE_TOKENS, plan).total_bytes > free:
        one = one // 2 if one > 64 else one - 1
    largest = one * PAGE_TOKENS
    if largest >= context:
        advice = f"one context of {context} tokens fits: take a smaller --kv-tokens"
    else:
        advice = (
            f"the largest context that fits is about {largest} tokens: --ctx-size {largest}"
            if largest
            else "not even a short context fits: free memory or take a smaller model"
        )
    raise MemoryLimitError(
        f"{format_bytes(needs.total_bytes)} are needed on {device} (weights {format_bytes(needs.weights_bytes)}, KV "
        f"cache {format_bytes(needs.kv_bytes)} for {pages * PAGE_TOKENS} tokens, workspace "
        f"{format_bytes(needs.workspace_bytes)}) but {format_bytes(free)} are free; {advice}",
        needs.total_bytes,
        free,
        largest,
    )


def format_bytes(count: int) -> str:
    """Return a byte count as people read it: decimal units, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
