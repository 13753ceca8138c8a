"""Rotary position embedding (Su et al., 2021) in the half-split form of Hugging Face's checkpoints."""

from __future__ import annotations

import math

import torch

from onekernel.config import ModelConfig


def inverse_frequencies(config: ModelConfig, total_tokens: int) -> torch.Tensor:
    """Return the head_dim / 2 inverse frequencies, float32.

    `total_tokens` is the longest the sequence may become; only `dynamic` scaling looks at it, so that the frequencies
    stay fixed while a sequence grows. Formulas as in transformers' `modeling_rope_utils` (llama3: Llama 3.1's).
    """
    scaling, dim, theta = config.rope_scaling, config.head_dim, config.rope_theta
    if scaling.kind == "dynamic":
        trained = config.max_position_embeddings
        stretch = scaling.factor * max(total_tokens, trained) / trained - (scaling.factor - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind != "llama3":
        return frequencies
    trained = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((trained / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_table(config: ModelConfig, total_tokens: int) -> torch.Tensor:
    """Return cosines and sines of every position: (2, total_tokens, head_dim / 2), float32, on the CPU."""
    angles = torch.outer(torch.arange(total_tokens, dtype=torch.float32), inverse_frequencies(config, total_tokens))
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head's pairs (i, i + head_dim / 2). x: (tokens, heads, head_dim); cos, sin: (tokens, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
