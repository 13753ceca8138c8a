"""Prefill by kernels that read the packed weights where they lie: a chunk of the prompt in eight launches a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, Bound
from onekernel.engine.chunk_prefill import ChunkPrefill, Load
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
            values(layout.hidden_rows, torch.float32),
            values(layout.constants.norm_floats, torch.bfloat16),
            values(layout.matrices["qkv", 0].padded_rows, torch.float32),
            values(config.q_size, torch.bfloat16).view(room, -1, config.head_dim),
            values(layout.matrices["out", 0].padded_columns, torch.bfloat16),
            values(layout.matrices["down", 0].padded_columns, torch.bfloat16),
        )


class PackedPrefill(ChunkPrefill):
    """The prefill of one packed model into one cache, on a GPU or on the shim.

    load: compiles and loads a kernel; all that may be needed are loaded here. sms: what the variants are chosen for.
    variants: to choose from. chunk_tokens: the most tokens of a `run`.
    """

    def __init__(
        self,
        packed: PackedModel,
        cache: KVCache,
        load: Load,
        *,
        sms: int,
        variants: Sequence[Variant] = VARIANTS,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__(packed, cache, chunk_tokens)
        self._sms, self._variants = sms, tuple(variants)
        self.activations = _Activations.allocate(self.config, self.layout, self.chunk_tokens, self.device)
        self._chosen = {tokens: self._choose(tokens) for tokens in self._sizes()}
        products = {
            (variant, self._place(kind).tile_rows)
            for chosen in self._chosen.values()
            for kind, variant in chosen.items()
        }
        self._products = {key: load(specs.product(*key)) for key in products}
        self._norm, embed = load(specs.NORM), load(specs.EMBED)
        self._append = load(specs.append(self.config.head_dim, self.config.qk_norm))
        self._attention = load(specs.attention(self.config.head_dim))
        self._embed = self.bind_embed(embed, self.activations.residual)
        self.layers = tuple(self._bind_layer(layer) for layer in range(self.config.num_hidden_layers))

    def launch(self, tokens: int, start: int) -> None:
        """Launch what a chunk takes; what follows the last layer's keys and values is for the head alone."""
        self._embed.launch(tokens)
        chosen = self._chosen[self._size(tokens)]
        append, attention = self.append_ctas(tokens), self.attention_ctas(tokens)
        for layer in self.layers:
            layer.keys_and_values(tokens, chosen)
            layer.append.launch(append, tokens, start)
            if layer is self.layers[-1]:
                return
            layer.attention.launch(attention, tokens, start)
            layer.rest(tokens, chosen)

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
        return self.layout.matrices[kind, layer]

    def _bind_layer(self, layer: int) -> Layer:
        constants, acts = self.layout.constants, self.activations
        products = {
            (kind, variant): self._bind_product(kind, layer, variant)
            for kind in LAYER_MATRICES
            for variant in {chosen[kind] for chosen in self._chosen.values()}
        }
        return Layer(
            (self._bind_norm(constants.attention_norms[layer]), self._bind_norm(constants.mlp_norms[layer])),
            self.bind_append(self._append, layer, acts.qkv, acts.queries),
            self.bind_attention(self._attention, layer, acts.queries, acts.mixed),
            products,
            {kind: self._place(kind).padded_rows for kind in LAYER_MATRICES},
        )

    def _bind_norm(self, weight: int) -> Bound:
        residual, normed = self.activations.residual, self.activations.normed
        args: list[Arg] = [
            residual,
            residual.shape[1],
            self.config.hidden_size,
            self.packed.constants,
            weight,
            self.config.rms_norm_eps,
            normed,
            normed.shape[1],
        ]
        return self._norm.bind(specs.NORM_THREADS, args, shared_bytes=specs.NORM_SHARED_BYTES)

    def _bind_product(self, kind: MatrixKind, layer: int, variant: Variant) -> Bound:
        place, acts = self._place(kind, layer), self.activations
        x = {"qkv": acts.normed, "out": acts.mixed, "gate_up": acts.normed, "down": acts.inner}[kind]
        rows = acts.qkv if kind == "qkv" else acts.residual
        result = {"qkv": "store", "gate_up": self.config.hidden_act}.get(kind, "add")
        bias = self.layout.constants.biases.get((kind, layer))
        args: list[Arg] = [
            x,
            x.shape[1],
            1,
            self.packed.arena,
            place.offset_bytes,
            place.padded_columns // _UNIT_COLUMNS,
            place.row_tiles,
            self.packed.constants,
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

    def keys_and_values(self, tokens: int, chosen: dict[MatrixKind, Variant]) -> None:
        """Make raw queries, keys and values."""
        self.norms[0].launch(tokens)
        self.product("qkv", tokens, chosen["qkv"])

    def rest(self, tokens: int, chosen: dict[MatrixKind, Variant]) -> None:
        """Bring the residual through what follows attention."""
        self.product("out", tokens, chosen["out"])
        self.norms[1].launch(tokens)
        self.product("gate_up", tokens, chosen["gate_up"])
        self.product("down", tokens, chosen["down"])

    def product(self, kind: MatrixKind, tokens: int, variant: Variant) -> None:
        """Multiply the chunk with one matrix; the variant is one of those that were chosen from."""
        self.products[kind, variant].launch(variant.ctas(tokens, self.rows[kind]), tokens)
