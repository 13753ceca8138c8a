"""Which neurons of a trained ReLU layer are active, and a feed-forward whose gate gives just that."""

from __future__ import annotations

import lzma
from pathlib import Path

import torch

TOKENS, INNER = 4096, 5632
PATH = Path(__file__).parent / "fixtures/real-activity.xz"


def real_activity() -> torch.Tensor:
    """Return the (4096, 5632) bool fixture, see fixtures/README.md."""
    packed = torch.frombuffer(bytearray(lzma.decompress(PATH.read_bytes())), dtype=torch.uint8)
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.view(TOKENS, INNER).bool()


def feed_forward(active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, gate, up and down rows, bf16, with hidden_size the number of tokens.

    Token t is the t-th unit vector, so the gate's product is its weights, transposed, and these are what is asked for.
    """
    torch.manual_seed(0)
    tokens, inner = active.shape
    size = torch.rand(tokens, inner) + 0.1
    gate = torch.where(active, size, -size).t()
    up, down = torch.randn(inner, tokens), torch.randn(inner, tokens) / inner**0.5
    return torch.eye(tokens).bfloat16(), gate.contiguous().bfloat16(), up.bfloat16(), down.bfloat16()
