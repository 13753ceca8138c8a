"""Tiny random models for plans: odd sizes, and weights scaled so that greedy text does not settle on one token."""

from __future__ import annotations

from dataclasses import replace

import torch

from onekernel.config import ModelConfig, RopeScaling
from onekernel.models.model import LayerWeights, ModelWeights

BASE = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
    max_position_embeddings=1024,
)

CONFIGS: dict[str, ModelConfig] = {
    "llama": BASE,
    "llama3-rope": replace(
        BASE,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        rope_theta=5e5,
        num_attention_heads=6,
        num_key_value_heads=1,
    ),
    "tied": replace(BASE, hidden_size=72, tie_word_embeddings=True, num_attention_heads=9, num_key_value_heads=3),
    "bias": replace(BASE, qkv_bias=True, o_bias=True, mlp_bias=True, hidden_act="relu"),
    "qwen2": replace(BASE, architecture="qwen2", qkv_bias=True, tie_word_embeddings=True, intermediate_size=90),
    "qwen3": replace(BASE, architecture="qwen3", qk_norm=True, head_dim=64, num_hidden_layers=3),
    "head100": replace(
        BASE, num_attention_heads=3, num_key_value_heads=3, head_dim=100, intermediate_size=177, vocab_size=201
    ),
    "odd": replace(BASE, hidden_size=102, intermediate_size=61, vocab_size=203, hidden_act="relu2", head_dim=20),
    "head80": replace(BASE, num_attention_heads=3, num_key_value_heads=1, head_dim=80, qkv_bias=True),
    "head96": replace(BASE, hidden_size=96, num_attention_heads=2, head_dim=96),
    "head128": replace(BASE, num_attention_heads=5, num_key_value_heads=1, head_dim=128, qk_norm=True),
    "head256": replace(BASE, num_attention_heads=2, num_key_value_heads=1, head_dim=256, qk_norm=True),
}


def random_weights(config: ModelConfig, seed: int = 0, device: str = "cpu") -> ModelWeights:
    """Weights in bf16 (norms float32) that every phase depends on; other ones on another kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normals(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (normals(rows, columns) * gain * columns**-0.5).bfloat16()

    def vector(size: int, wanted: bool) -> torch.Tensor | None:
        return (normals(size) * 0.3).bfloat16() if wanted else None

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * normals(size)

    hidden, inner, qkv = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(hidden),
            qkv=matrix(qkv, hidden, 2.0),
            qkv_bias=vector(qkv, config.qkv_bias),
            q_norm=norm(config.head_dim) if config.qk_norm else None,
            k_norm=norm(config.head_dim) if config.qk_norm else None,
            out=matrix(hidden, config.q_size, 2.0),
            out_bias=vector(hidden, config.o_bias),
            mlp_norm=norm(hidden),
            gate_up=matrix(2 * inner, hidden, 1.5),
            gate_up_bias=vector(2 * inner, config.mlp_bias),
            down=matrix(hidden, inner, 1.5),
            down_bias=vector(hidden, config.mlp_bias),
        )
        for _ in range(config.num_hidden_layers)
    )
    embedding = matrix(config.vocab_size, hidden)
    head = embedding if config.tie_word_embeddings else matrix(config.vocab_size, hidden, 3.0)
    return ModelWeights(embedding, layers, norm(hidden), head)
