"""What decode.py is set beside: transformers with a static cache, and a plain PyTorch decoder in the way of gpt-fast.

Each function returns a callable that answers once and returns (us per token, ms to the first token). Both compile with
torch.compile in mode reduce-overhead, which replays CUDA graphs; their weights are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onekernel.config import ModelConfig
from onekernel.phases.attention.rope import rope_table


class Timing(NamedTuple):
    us_per_token: float
    ttft_ms: float


def finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def transformers_static(values: Mapping[str, Any], ids: Sequence[int], new: int, device: str) -> Callable[[], Timing]:
    """transformers' generate with cache_implementation="static", which compiles the decode step by itself on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    others = {key: value for key, value in values.items() if key != "model_type"}
    config = AutoConfig.for_model(values["model_type"], **others)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(ids)], device=device)

    def run() -> Timing:
        clock = Clock()
        finish(device)
        begun = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
            streamer=clock,
            pad_token_id=0,
        )
        tokens = clock.times[1:]  # the first call brings the prompt
        return Timing((tokens[-1] - tokens[0]) * 1e6 / (len(tokens) - 1), (tokens[0] - begun) * 1e3)

    return run


class PlainLayer(nn.Module):
    """One decoder layer with fused q, k, v and gate, up, and a static cache (1, kv_heads, context, head_dim)."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.config = config
        hidden, inner, qkv = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size
        self.qkv = nn.Linear(hidden, qkv, bias=config.qkv_bias)
        self.out = nn.Linear(config.q_size, hidden, bias=config.o_bias)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x: Tensor, positions: Tensor, rope: Tensor, mask: Tensor) -> Tensor:
        config, tokens = self.config, x.shape[1]
        q, k, v = self.qkv(self.attention_norm(x)).split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q, k, v = (part.view(1, tokens, -1, config.head_dim) for part in (q, k, v))
        q, k = turn(self.q_norm(q), rope), turn(self.k_norm(k), rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        group = config.num_attention_heads // config.num_key_value_heads
        keys, values = self.keys.repeat_interleave(group, 1), self.values.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(1, tokens, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE in the half-split form. x: (1, tokens, heads, head_dim); rope: (2, tokens, head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope[:, None, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PlainDecoder(nn.Module):
    """The model up to the chosen token."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config, context) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(context, context, dtype=torch.bool).tril())

    def forward(self, ids: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
        x, mask, turns = self.embedding(ids), self.mask[positions], rope[:, positions]
        for layer in self.layers:
            x = layer(x, positions, turns, mask)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def plain_decoder(
    config: ModelConfig, ids: Sequence[int], new: int, device: str, *, tuned: bool
) -> Callable[[], Timing]:
    """A loop over a compiled decode step. `tuned`: with inductor's coordinate descent tuning, as gpt-fast sets it."""
    torch._inductor.config.coordinate_descent_tuning = tuned
    with torch.device(device):
        model = PlainDecoder(config, len(ids) + new).to(torch.bfloat16).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        prompt, positions = torch.tensor([list(ids)]), torch.arange(len(ids) + new)
    rope = rope_table(config, len(ids) + new).to(device)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def run() -> Timing:
        finish(device)
        begun = time.perf_counter()
        token = model(prompt, positions[: len(ids)], rope)
        finish(device)
        first = time.perf_counter()
        for index in range(len(ids), len(ids) + new - 1):
            token = step(token, positions[index : index + 1], rope).clone()  # the graph's output is overwritten
        finish(device)
        return Timing((time.perf_counter() - first) * 1e6 / (new - 1), (first - begun) * 1e3)

    return run
