"""One feed-forward and what goes into it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.sparse_patterns import Pattern
from benchmarks.sparse_timing import CHECKED_TOKENS


@dataclass(frozen=True, slots=True)
class Layer:
    """One feed-forward and what goes into it, bf16; down is (hidden, inner)."""

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, pattern: Pattern, hidden: int, device: str) -> Layer:
        x, gate = pattern.inputs(hidden, device)
        draw = torch.Generator(device).manual_seed(1)
        inner = len(gate)
        up = torch.randn(inner, hidden, generator=draw, device=device) / hidden**0.5
        down = torch.randn(hidden, inner, generator=draw, device=device) / inner**0.5
        return cls(x, gate, up.bfloat16(), down.bfloat16())

    @classmethod
    def saved(cls, path: Path, device: str) -> Layer:
        parts = torch.load(path, map_location=device, weights_only=True)
        return cls(*(parts[name].bfloat16() for name in ("x", "gate", "up", "down")))

    def float32(self) -> torch.Tensor:
        """The result for the first tokens, all in float32."""
        x, gate, up, down = (part.float() for part in (self.x[:CHECKED_TOKENS], self.gate, self.up, self.down))
        return F.linear(F.relu(F.linear(x, gate)) * F.linear(x, up), down)


def dense(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return what ours is set beside: three products and what PyTorch does between them."""
    return F.linear(F.relu(F.linear(x, gate)) * F.linear(x, up), down)
