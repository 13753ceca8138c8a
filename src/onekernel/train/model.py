"""A Llama or Qwen in PyTorch that can be trained; its parameters have the names of a Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onekernel.config import ModelConfig
from onekernel.errors import UnsupportedModelError
from onekernel.ops.sparse_training import SparsityStats
from onekernel.phases.attention.rope import rope_table, rotate
from onekernel.train.feed_forward import FeedForward

Activation = Literal["silu", "relu", "relu2"]

Done = tuple[Tensor, Tensor, Tensor | None]
"""Of one feed-forward: penalty, active neurons by token, active tokens by neuron if they are counted; see `Trained`."""


class Losses(NamedTuple):
    """What one micro-batch gives: means over its tokens as float32 scalars, and counts, all on the device."""

    loss: Tensor
    """Cross entropy, nats."""
    penalty: Tensor
    """Mean over layers of the sum over neurons of |h|."""
    row_counts: list[Tensor]
    """By layer, (tokens,) int32: active neurons of each token."""
    neuron_counts: list[Tensor | None]
    """By layer, (intermediate,) int64: tokens that each neuron was active for, if the model counts neurons."""

    def add_to(self, stats: SparsityStats, *, by_neuron: bool = True) -> None:
        """Add what was active to the counters, unless asked otherwise by neuron too; nothing waits for the device."""
        for layer, (rows, neurons) in enumerate(zip(self.row_counts, self.neuron_counts, strict=True)):
            stats.observe(layer, rows, neurons if by_neuron else None)


class Attention(nn.Module):
    """Causal attention with RoPE and shared key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, hidden, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return the output for x, (batch, tokens, hidden); rope: (2, tokens, head_dim / 2)."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(heads, rope[0], rope[1]).to(v.dtype) for heads in (q, k))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm, added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Done]:
        """Return the residual after this layer, and what its feed-forward did.

        In plain tuples: a compiled frame cannot return named ones in every version of PyTorch.
        """
        x = x + self.self_attn(self.input_layernorm(x), rope)
        out, penalty, row_counts, neuron_counts = self.mlp(self.post_attention_layernorm(x))
        return x + out, (penalty, row_counts, neuron_counts)


class SparseLlama(nn.Module):
    """The whole model. `context` is the longest piece that it will see."""

    rope: Tensor

    def __init__(self, config: ModelConfig, context: int, *, recompute: bool = False) -> None:
        """Raises UnsupportedModelError for what cannot be trained: ternary models, feed-forwards with biases."""
        super().__init__()
        _refuse(config, context)
        self.config, self.recompute = config, recompute
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("rope", rope_table(config, context), persistent=False)

    @property
    def layers(self) -> list[Layer]:
        """The layers in order."""
        return [layer for layer in self.get_submodule("model.layers").children() if isinstance(layer, Layer)]

    def set_activation(self, activation: Activation) -> None:
        """Let every feed-forward use another activation from now on."""
        for layer in self.layers:
            layer.mlp.activation = activation

    def count_neurons(self, wanted: bool) -> None:
        """Let every feed-forward count by neuron too, or not, from now on."""
        for layer in self.layers:
            layer.mlp.count_neurons = wanted

    def logits(self, ids: Tensor) -> tuple[Tensor, list[Done]]:
        """Return the logits after each of ids, (batch, tokens) int64, and what the feed-forwards did."""
        body: Any = self.model
        x, rope = body.embed_tokens(ids), self.rope[:, : ids.shape[1]]
        done = []
        for layer in body.layers:
            if self.recompute and self.training:
                x, did = checkpoint(layer, x, rope, use_reentrant=False)
            else:
                x, did = layer(x, rope)
            done.append(did)
        x = body.norm(x)
        head = body.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(x, head), done

    def forward(self, ids: Tensor) -> Losses:
        """Return the losses of pieces, (batch, context + 1) int64: each token is predicted from those before it."""
        logits, done = self.logits(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        penalties, rows, neurons = zip(*done, strict=True)
        return Losses(loss, torch.stack(penalties).mean(), list(rows), list(neurons))


def initialise(model: SparseLlama, seed: int) -> None:
    """Draw new weights: normal, deviation 0.02, smaller by sqrt(2 layers) where a product is added to the residual."""
    draw = torch.Generator().manual_seed(seed)
    added = 0.02 / (2 * model.config.num_hidden_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                deviation = added if "o_proj" in name or "down_proj" in name else 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, deviation, generator=draw))


def _refuse(config: ModelConfig, context: int) -> None:
    if config.ternary is not None or config.sub_norms:
        raise UnsupportedModelError(
            f"a ternary {config.architecture} cannot be trained here; give a bf16 Llama or Qwen"
        )
    if config.mlp_bias:
        raise UnsupportedModelError("the model's feed-forwards have biases (mlp_bias), which the sparse form lacks")
    if config.sliding_window is not None and config.sliding_window < context:
        raise UnsupportedModelError(
            f"the model attends to a window of {config.sliding_window} tokens and pieces have {context}; only full "
            f"attention is built in: set data.context to {config.sliding_window} or less"
        )
    if context > config.context_limit:
        raise UnsupportedModelError(
            f"data.context is {context}; the model allows {config.context_limit} tokens: set it to that or less"
        )
