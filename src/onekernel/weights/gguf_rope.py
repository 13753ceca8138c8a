"""Llama 3's RoPE scaling out of a GGUF: a tensor of divisors there, four numbers in a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from onekernel.errors import UnsupportedModelError

TENSOR = "rope_freqs.weight"
"""float32, (head_dim / 2,): what llama.cpp divides each rotary frequency by."""

_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
"""low_freq_factor, high_freq_factor and original_max_position_embeddings of every published Llama 3.x."""


def llama3_scaling(divisors: torch.Tensor, config: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the `rope_scaling` whose divisors these are, or the config's own if all are 1.

    Raises UnsupportedModelError for divisors that the formula with Llama 3's constants does not give.
    """
    if torch.equal(divisors, torch.ones_like(divisors)):
        own: dict[str, Any] | None = config["rope_scaling"]
        return own
    factor = round(float(divisors.max()), 4)
    formula = llama3_divisors(config["head_dim"] // 2, config["rope_theta"], factor)
    if divisors.shape != formula.shape or not torch.allclose(divisors, formula, rtol=1e-4):
        raise UnsupportedModelError(
            f"{path}: {TENSOR} holds RoPE divisors up to {factor} that are not Llama 3's; use the safetensors model"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def llama3_divisors(count: int, theta: float, factor: float) -> torch.Tensor:
    """Return the divisors of Llama 3.1's formula: 1 for short wavelengths, `factor` for long ones, smooth between."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    smooth = ((_ORIGINAL / wavelengths - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).to(torch.float32)
