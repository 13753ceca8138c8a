"""A Llama-class decoder as a list of phases on PyTorch: plain, any device, the authority for every kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from onekernel.config import ModelConfig
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.reference import attention
from onekernel.phases.down.reference import down
from onekernel.phases.embed.reference import Table, embed
from onekernel.phases.gate_up.reference import gate_up
from onekernel.phases.head.reference import head
from onekernel.phases.linear import Weight
from onekernel.phases.out.reference import out
from onekernel.phases.qkv.reference import qkv

LAYER_PHASES = ("qkv", "attention", "out", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's matrices, (rows, K) in the model's dtype or ternary; norms are float32, biases in that dtype."""

    attention_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None
    attention_sub_norm: torch.Tensor | None = None
    mlp_sub_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights; `head` is the embedding itself if they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.embedding.dtype


class Weights(Protocol):
    """What a model asks of its weights, however they lie: `ModelWeights`, or packed ones, unpacked on demand."""

    @property
    def embedding(self) -> Table:
        """Rows by token id."""
        ...

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """The layers in order; one may hold only until the next is asked for."""
        ...

    @property
    def final_norm(self) -> torch.Tensor:
        """(hidden_size,) float32."""
        ...

    @property
    def head(self) -> Weight:
        """(vocab_size, hidden_size)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense matrices and of the KV cache."""
        ...


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of the model over the whole width; `layer` is 0 where there is only one."""

    name: str
    layer: int = 0


@dataclass(slots=True)
class Activations:
    """What phases hand to each other, float32: each attribute is written by the phases named after it."""

    token_ids: torch.Tensor  # (tokens,)
    residual: torch.Tensor  # (tokens, hidden_size): embed, out, down
    qkv: torch.Tensor | None = None  # (tokens, q_size + 2 * kv_size): qkv
    mixed: torch.Tensor | None = None  # (tokens, q_size): attention
    inner: torch.Tensor | None = None  # (tokens, intermediate_size): gate_up
    logits: torch.Tensor | None = None  # (tokens, vocab_size): head


@dataclass(frozen=True, slots=True)
class Place:
    """Where a forward pass stands: the cache, the sequence's pages (CPU, int64), its RoPE table, the first position."""

    cache: KVCache
    page_table: torch.Tensor
    rope: torch.Tensor
    start: int


def phases(config: ModelConfig) -> tuple[Phase, ...]:
    """Return the phases of a token in order, without the choice of the next one."""
    layers = (Phase(name, layer) for layer in range(config.num_hidden_layers) for name in LAYER_PHASES)
    return (Phase("embed"), *layers, Phase("head"))


class Model:
    """Runs phases on weights. Holds no sequence: the caller brings the cache and the place in it."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.phases = phases(config)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.weights.dtype

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], place: Place) -> None:
        """Append keys and values of `token_ids` to the cache at `place`."""
        acts = self.start(token_ids)
        for phase in self.phases[:-1]:
            self.run(phase, acts, place)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], place: Place) -> torch.Tensor:
        """Append `token_ids` at `place` and return logits (tokens, vocab_size), float32."""
        acts = self.start(token_ids)
        for phase in self.phases:
            self.run(phase, acts, place)
        return _made(acts.logits, "head")

    def start(self, token_ids: Sequence[int]) -> Activations:
        """Return empty activations for these tokens."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        return Activations(ids, torch.empty(0, device=self.device))

    def run(self, phase: Phase, acts: Activations, place: Place) -> None:
        """Run one phase on `acts`, in place."""
        config, eps = self.config, self.config.rms_norm_eps
        if phase.name == "embed":
            acts.residual = embed(acts.token_ids, self.weights.embedding)
            return
        if phase.name == "head":
            acts.logits = head(acts.residual, self.weights.final_norm, eps, self.weights.head)
            return
        w = self.weights.layers[phase.layer]
        if phase.name == "qkv":
            acts.qkv = qkv(acts.residual, w.attention_norm, eps, w.qkv, w.qkv_bias)
        elif phase.name == "attention":
            acts.mixed = attention(
                _made(acts.qkv, "qkv"),
                w.q_norm,
                w.k_norm,
                place.rope,
                place.cache,
                phase.layer,
                place.page_table,
                place.start,
                config,
            )
        elif phase.name == "out":
            acts.residual = out(
                acts.residual, _made(acts.mixed, "attention"), w.out, w.out_bias, w.attention_sub_norm, eps
            )
        elif phase.name == "gate_up":
            acts.inner = gate_up(acts.residual, w.mlp_norm, eps, w.gate_up, w.gate_up_bias, config.hidden_act)
        elif phase.name == "down":
            acts.residual = down(acts.residual, _made(acts.inner, "gate_up"), w.down, w.down_bias, w.mlp_sub_norm, eps)
        else:
            raise ValueError(f"there is no phase {phase.name!r}; phases are embed, {', '.join(LAYER_PHASES)}, head")


def _made(value: torch.Tensor | None, phase: str) -> torch.Tensor:
    if value is None:
        raise ValueError(f"the {phase} phase has not run yet")
    return value
