"""A plain Llama with a gated ReLU feed-forward, for training and for whole-model forwards: PyTorch and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Sizes:
    """The published models' by default: 0.5 B parameters with 8 layers, 2 B with 38."""

    layers: int = 8
    hidden: int = 2048
    inner: int = 5632
    heads: int = 32
    vocab: int = 49152
    context: int = 2048


class ReluFFN(nn.Module):
    """down(relu(gate(x)) * up(x)); keeps what the L1 penalty needs: the mean over tokens of sum |relu(gate) * up|."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)
        self.act_fn = nn.ReLU()
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.training:
            self.penalty = inner.float().abs().sum(-1).mean()
        out: Tensor = self.down_proj(inner)
        return out


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.input_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.mlp: nn.Module = ReluFFN(sizes)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(self.input_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(heads[0], rope), rotate(heads[1], rope)
        mixed = F.scaled_dot_product_attention(q, k, heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp(self.ffn_norm(x))


class SparseLlama(nn.Module):
    """The body, and with `logits` the tied head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.register_buffer("rope", rope_angles(sizes.hidden // sizes.heads, sizes.context), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.rope[:, : ids.shape[1]].to(x.dtype))
        out: Tensor = self.norm(x)
        return out

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self(ids), self.embed.weight)


def rope_angles(width: int, length: int, theta: float = 1e4) -> Tensor:
    """Return cosines and sines, (2, length, width / 2)."""
    turns = torch.arange(length)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    return torch.stack([turns.cos(), turns.sin()])


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    cos, sin = rope
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
