"""Reference of the attention phase."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onekernel.config import ModelConfig
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rotate
from onekernel.phases.norm import rms_norm


def attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rope: torch.Tensor,
    cache: KVCache,
    layer: int,
    page_table: torch.Tensor,
    start: int,
    config: ModelConfig,
) -> torch.Tensor:
    """Append the tokens' keys and values to the cache and return the attention's output, (tokens, q_size) float32.

    qkv: (tokens, q_size + 2 * kv_size) float32, raw; q_norm, k_norm: (head_dim,) or None; rope: (2, positions,
    head_dim / 2); the tokens stand at positions `start` and on, and attend to all before them. Keys are stored rotated.
    """
    tokens, head_dim, kv_heads = qkv.shape[0], config.head_dim, config.num_key_value_heads
    q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
    q, k = q.view(tokens, -1, head_dim), k.view(tokens, -1, head_dim)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, config.rms_norm_eps), rms_norm(k, k_norm, config.rms_norm_eps)
    cos, sin = rope[:, start : start + tokens]
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    cache.append(layer, page_table, start, k, v.view(tokens, -1, head_dim))
    keys, values = cache.read(layer, page_table, start + tokens)
    q = q.to(keys.dtype)
    if not keys.is_cuda:  # a CPU multiplies bf16 slower than float32
        q, keys, values = q.float(), keys.float(), values.float()
    if tokens == 1:  # the query heads of one KV head are the rows of one product: no mask, no repeated keys
        group = q.view(1, kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(group, keys[None], values[None]).reshape(1, -1).float()
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], **_causal(tokens, start, keys), enable_gqa=True
    )
    return mixed[0].transpose(0, 1).reshape(tokens, -1).float()


def _causal(tokens: int, start: int, keys: torch.Tensor) -> dict[str, Any]:
    """Return the options that let each of `tokens` positions from `start` on see itself and what is before it."""
    if keys.is_cuda and keys.dtype is torch.bfloat16:  # flash attention takes no mask, but knows these shapes of one
        if start == 0:
            return {"is_causal": True}
        # Imported when it is needed: it brings torch._dynamo and sympy along, a third of the time of a start.
        from torch.nn.attention.bias import causal_lower_right

        return {"attn_mask": causal_lower_right(tokens, start + tokens)}
    return {"attn_mask": torch.ones(tokens, start + tokens, dtype=torch.bool, device=keys.device).tril(start)}
