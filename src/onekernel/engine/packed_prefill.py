"""Prefill by kernels that read the packed weights where they lie: a chunk of the prompt in eight launches a layer.

A token's keys and values have the same bits whatever comes with it: no kernel's arithmetic for a token depends on the
other tokens of the chunk, on their number, or on where the chunk begins. So a prompt may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, BindableKernel, Bound
from onekernel.device.spec import KernelSpec
from onekernel.errors import ConfigError
from onekernel.kernels.prefill import specs
from onekernel.kernels.prefill.variants import VARIANTS, Variant, choose
from onekernel.models.packed import PackedModel
from onekernel.phases.attention.cache import KVCache
from onekernel.weights.arena import LAYER_MATRICES, MatrixKind, MatrixPlace, WeightLayout

CHUNK_TOKENS = 2048
"""Tokens of one run: enough to keep the tensor cores busy, few enough that a cancelled request ends soon."""

_UNIT_COLUMNS = 64
"""Columns of K that a product counts in."""


def usable_variants(shared_bytes: int) -> tuple[Variant, ...]:
    """Return the variants whose stages fit a CTA's shared memory."""
    return tuple(variant for variant in VARIANTS if variant.shared_bytes <= shared_bytes)


def why_not(config: ModelConfig, layout: WeightLayout, shared_bytes: int) -> str | None:
    """Return why these kernels cannot run a model on a device with this much shared memory a CTA, or None."""
    if config.ternary is not None:
        return "the weights are ternary; the kernels take bf16"
    if layout.sparse:
        return "the feed-forwards are packed as neurons; the kernels take matrices"
    needed = specs.attention_shared_bytes(config.head_dim)
    if config.head_dim % 4:
        return f"head_dim is {config.head_dim}; the kernels take heads in fours"
    if needed > shared_bytes or not usable_variants(shared_bytes):
        return f"head_dim {config.head_dim} needs {needed} bytes of shared memory; a CTA has {shared_bytes}"
    return None


def workspace_bytes(config: ModelConfig, layout: WeightLayout, tokens: int) -> int:
    """Return the bytes of a chunk's activations."""
    qkv, out, down = (layout.matrices[kind, 0] for kind in ("qkv", "out", "down"))
    floats = layout.hidden_rows + qkv.padded_rows
    halves = layout.constants.norm_floats + config.q_size + out.padded_columns + down.padded_columns
    return tokens * (4 * floats + 2 * halves + 4)


@dataclass(frozen=True, slots=True)
class _Activations:
    """A chunk's values. Padding columns of what products read are zero from the start and never written."""

    ids: torch.Tensor  # (room,) int32
    residual: torch.Tensor  # (room, hidden_rows) float32
    normed: torch.Tensor  # (room, norm_floats) bf16
    qkv: torch.Tensor  # (room, padded rows) float32
    queries: torch.Tensor  # (room, heads, head_dim) bf16
    mixed: torch.Tensor  # (room, padded columns of out) bf16
    inner: torch.Tensor  # (room, padded columns of down) bf16

    @classmethod
    def allocate(cls, config: ModelConfig, layout: WeightLayout, room: int, device: torch.device) -> _Activations:
        def values(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(room, columns, dtype=dtype, device=device)

        return cls(
            torch.zeros(room, dtype=torch.int32, device=device),
            values(layout.hidden_rows, torch.float32),
            values(layout.constants.norm_floats, torch.bfloat16),
            values(layout.matrices["qkv", 0].padded_rows, torch.float32),
            values(config.q_size, torch.bfloat16).view(room, -1, config.head_dim),
            values(layout.matrices["out", 0].padded_columns, torch.bfloat16),
            values(layout.matrices["down", 0].padded_columns, torch.bfloat16),
        )


class PackedPrefill:
    """The prefill of one packed model into one cache, on a GPU or on the shim.

    load: compiles and loads a kernel; all that may be needed are loaded here. sms: what the variants are chosen for.
    variants: to choose from. chunk_tokens: the most tokens of a `run`.
    """

    def __init__(
        self,
        packed: PackedModel,
        cache: KVCache,
        load: Callable[[KernelSpec], BindableKernel],
        *,
        sms: int,
        variants: Sequence[Variant] = VARIANTS,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.cache, self._packed, self._sms, self._variants = cache, packed, sms, tuple(variants)
        self._config, self._layout, self._device = packed.config, packed.layout, packed.arena.device
        self.chunk_tokens = min(chunk_tokens, packed.layout.constants.context_tokens)
        self.activations = _Activations.allocate(self._config, self._layout, self.chunk_tokens, self._device)
        self._table = torch.zeros(cache.num_pages, dtype=torch.int32, device=self._device)
        self._chosen = {tokens: self._choose(tokens) for tokens in self._sizes()}
        products = {
            (variant, self._place(kind).tile_rows)
            for chosen in self._chosen.values()
            for kind, variant in chosen.items()
        }
        self._products = {key: load(specs.product(*key)) for key in products}
        self._norm, embed = load(specs.NORM), load(specs.EMBED)
        self._append = load(specs.append(self._config.head_dim, self._config.qk_norm))
        self._attention = load(specs.attention(self._config.head_dim))
        self._embed = self._bind_embed(embed)
        self.layers = tuple(self._bind_layer(layer) for layer in range(self._config.num_hidden_layers))

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], page_table: torch.Tensor, start: int) -> None:
        """Append keys and values of 1 to `chunk_tokens` tokens from position `start` on; on a GPU, only start to.

        page_table: the sequence's pages, at least those of all positions so far, whole numbers on any device. Raises
        ConfigError for more tokens, and for positions past the context.
        """
        tokens, context = len(token_ids), self._layout.constants.context_tokens
        if not 1 <= tokens <= self.chunk_tokens or not 0 <= start <= context - tokens:
            raise ConfigError(
                f"{tokens} tokens from position {start} on are no chunk; it has 1 to {self.chunk_tokens} tokens and "
                f"ends within the context of {context}"
            )
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with on_device:
            self.activations.ids[:tokens].copy_(torch.tensor(token_ids, dtype=torch.int32))
            self._table[: len(page_table)].copy_(page_table)
            self._embed.launch(tokens)
            chosen = self._chosen[self._size(tokens)]
            for layer in self.layers[:-1]:
                layer.keys_and_values(tokens, start, chosen)
                layer.rest(tokens, start, chosen)
            self.layers[-1].keys_and_values(tokens, start, chosen)  # what follows them is for the head alone

    def _sizes(self) -> Iterator[int]:
        """Yield the chunk sizes for which variants are chosen: every 16 tokens."""
        return iter(range(16, self.chunk_tokens + 16, 16))

    @staticmethod
    def _size(tokens: int) -> int:
        return -(-tokens // 16) * 16

    def _choose(self, tokens: int) -> dict[MatrixKind, Variant]:
        return {
            kind: choose(tokens, self._place(kind).padded_rows, self._sms, self._variants) for kind in LAYER_MATRICES
        }

    def _place(self, kind: MatrixKind, layer: int = 0) -> MatrixPlace:
        return self._layout.matrices[kind, layer]

    def _bind_embed(self, kernel: BindableKernel) -> Bound:
        layout, residual = self._layout, self.activations.residual
        args: list[Arg] = [
            self.activations.ids,
            self._packed.arena,
            layout.embedding_bytes,
            layout.head.tile_rows if layout.embed_packed else 0,
            layout.head.k_units,
            self._config.hidden_size,
            residual,
            residual.shape[1],
        ]
        return kernel.bind(specs.EMBED_THREADS, args)

    def _bind_layer(self, layer: int) -> Layer:
        constants, config = self._layout.constants, self._config
        products = {
            (kind, variant): self._bind_product(kind, layer, variant)
            for kind in LAYER_MATRICES
            for variant in {chosen[kind] for chosen in self._chosen.values()}
        }
        return Layer(
            (self._bind_norm(constants.attention_norms[layer]), self._bind_norm(constants.mlp_norms[layer])),
            self._bind_append(layer),
            self._bind_attention(layer),
            products,
            {kind: self._place(kind).padded_rows for kind in LAYER_MATRICES},
            config.num_attention_heads,
            config.num_key_value_heads,
        )

    def _bind_norm(self, weight: int) -> Bound:
        residual, normed = self.activations.residual, self.activations.normed
        args: list[Arg] = [
            residual,
            residual.shape[1],
            self._config.hidden_size,
            self._packed.constants,
            weight,
            self._config.rms_norm_eps,
            normed,
            normed.shape[1],
        ]
        return self._norm.bind(specs.NORM_THREADS, args, shared_bytes=specs.NORM_SHARED_BYTES)

    def _bind_append(self, layer: int) -> Bound:
        config, constants, acts = self._config, self._layout.constants, self.activations
        own_norms = layer * config.head_dim if config.qk_norm else 0
        args: list[Arg] = [
            acts.qkv,
            acts.qkv.shape[1],
            1,
            0,
            config.num_attention_heads,
            config.num_key_value_heads,
            self._packed.constants,
            constants.rope,
            constants.q_norm + own_norms,
            constants.k_norm + own_norms,
            config.rms_norm_eps,
            self._table,
            self.cache.pages[layer],
            acts.queries,
        ]
        return self._append.bind(specs.APPEND_THREADS, args, changing=("tokens", "start"))

    def _bind_attention(self, layer: int) -> Bound:
        config, acts = self._config, self.activations
        args: list[Arg] = [
            acts.queries,
            config.num_attention_heads,
            1,
            0,
            math.log2(math.e) / math.sqrt(config.head_dim),
            self._table,
            self.cache.pages[layer],
            config.num_key_value_heads,
            acts.mixed,
            acts.mixed.shape[1],
        ]
        shared_bytes = specs.attention_shared_bytes(config.head_dim)
        return self._attention.bind(
            specs.ATTENTION_THREADS, args, shared_bytes=shared_bytes, changing=("tokens", "start")
        )

    def _bind_product(self, kind: MatrixKind, layer: int, variant: Variant) -> Bound:
        place, acts = self._place(kind, layer), self.activations
        x = {"qkv": acts.normed, "out": acts.mixed, "gate_up": acts.normed, "down": acts.inner}[kind]
        rows = acts.qkv if kind == "qkv" else acts.residual
        result = {"qkv": "store", "gate_up": self._config.hidden_act}.get(kind, "add")
        bias = self._layout.constants.biases.get((kind, layer))
        args: list[Arg] = [
            x,
            x.shape[1],
            1,
            self._packed.arena,
            place.offset_bytes,
            place.padded_columns // _UNIT_COLUMNS,
            place.row_tiles,
            self._packed.constants,
            0 if bias is None else bias + 1,
            specs.RESULTS[result],
            rows,
            rows.shape[1],
            acts.inner,
            acts.inner.shape[1],
        ]
        return self._products[variant, place.tile_rows].bind(
            variant.threads, args, shared_bytes=variant.shared_bytes, changing=("tokens",)
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """The prepared launches of one layer."""

    norms: tuple[Bound, Bound]
    append: Bound
    attention: Bound
    products: dict[tuple[MatrixKind, Variant], Bound]
    rows: dict[MatrixKind, int]
    heads: int
    kv_heads: int

    def keys_and_values(self, tokens: int, start: int, chosen: dict[MatrixKind, Variant]) -> None:
        """Extend the cache, and leave rotated queries."""
        self.norms[0].launch(tokens)
        self.product("qkv", tokens, chosen["qkv"])
        vectors = tokens * (self.heads + 2 * self.kv_heads)
        self.append.launch(-(-vectors // specs.APPEND_VECTORS), tokens, start)

    def rest(self, tokens: int, start: int, chosen: dict[MatrixKind, Variant]) -> None:
        """Bring the residual through attention and the feed-forward."""
        self.attention.launch(self.heads * -(-tokens // specs.ATTENTION_QUERIES), tokens, start)
        self.product("out", tokens, chosen["out"])
        self.norms[1].launch(tokens)
        self.product("gate_up", tokens, chosen["gate_up"])
        self.product("down", tokens, chosen["down"])

    def product(self, kind: MatrixKind, tokens: int, variant: Variant) -> None:
        """Multiply the chunk with one matrix; the variant is one of those that were chosen from."""
        self.products[kind, variant].launch(variant.ctas(tokens, self.rows[kind]), tokens)
