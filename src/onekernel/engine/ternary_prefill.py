"""Prefill of ternary models by kernels that read the packed weights where they lie: ten launches a layer.

The rounding is the contract's (onekernel/phases/ternary.py): residual, queries before RoPE, what attention mixes and
the inner activations are float32, and every product's sums are exact. Only attention adds in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, BindableKernel, Bound
from onekernel.engine.chunk_prefill import ChunkPrefill, Load
from onekernel.kernels.prefill import specs
from onekernel.kernels.ternary.prefill import PrefillShape, choose_prefill, prefill_shapes
from onekernel.kernels.ternary.quantise import QuantiseShape
from onekernel.kernels.ternary.wgmma import LEAST_TOKENS, WgmmaShape, choose_wgmma, ordered_columns, wgmma_shapes
from onekernel.models.packed import PackedModel
from onekernel.phases.attention.cache import KVCache
from onekernel.weights.arena import LAYER_MATRICES, MatrixKind, WeightLayout

CHUNK_TOKENS = 1024
"""Tokens of one run: enough for two waves of the largest tiles, in an eighth of the weights' memory."""

Shape = PrefillShape | WgmmaShape

_PIECE = 16
"""Bytes that are copied at once: rows of int8 are whole ones of them, and a strip of gate_up is whole."""


def why_not(config: ModelConfig, layout: WeightLayout, shared_bytes: int) -> str | None:
    """Return why these kernels cannot run a model on a device with this much shared memory a CTA, or None."""
    if config.ternary is None:
        return "the weights are not ternary"
    if any(kind in LAYER_MATRICES for kind, _ in layout.constants.biases):
        return "the products have biases; the kernels add none"
    sizes = (config.hidden_size, config.q_size, config.intermediate_size)
    if any(size % _PIECE for size in sizes) or config.head_dim % 4:
        return f"the sizes are {sizes} in heads of {config.head_dim}; the kernels take sixteens, and heads in fours"
    largest = max(shape.shared_bytes(0) for shape in prefill_shapes(config.ternary.group or 0))
    needed = max(largest, specs.attention_shared_bytes(config.head_dim))
    if needed > shared_bytes:
        return f"the kernels need {needed} bytes of shared memory; a CTA has {shared_bytes}"
    return None


def workspace_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of a chunk's activations."""
    hidden, q, inner = config.hidden_size, config.q_size, config.intermediate_size
    floats = hidden + q + 2 * config.kv_size + q + inner + 1
    return tokens * (4 * floats + 2 * q + _widest(config) + 2 * 4)


def _widest(config: ModelConfig) -> int:
    """Columns of the widest product's int8 values."""
    return ordered_columns(max(config.hidden_size, config.q_size, config.intermediate_size))


@dataclass(frozen=True, slots=True)
class _Activations:
    """A chunk's values, (room, ...)."""

    residual: torch.Tensor  # float32
    qkv: torch.Tensor  # float32
    queries: torch.Tensor  # (room, heads, head_dim) bf16
    mixed: torch.Tensor  # float32
    inner: torch.Tensor  # float32
    quantised: torch.Tensor  # (room * columns of the widest,) int8
    inverse: torch.Tensor  # (room,) float32: what the int8 values at hand were multiplied by
    sums: torch.Tensor  # (room,) int32: of the int8 values at hand


class TernaryPrefill(ChunkPrefill):
    """The prefill of one packed ternary model into one cache, on a GPU or on the shim.

    load: compiles and loads a kernel; all that may be needed are loaded here. sms: what products' shapes are chosen
    for. wgmma: whether the device has the products of warpgroups.
    """

    def __init__(
        self,
        packed: PackedModel,
        cache: KVCache,
        load: Load,
        *,
        sms: int,
        wgmma: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__(packed, cache, chunk_tokens)
        config = self.config
        self._group, self._sms = (config.ternary.group or 0) if config.ternary else 0, sms
        self._wgmma = wgmma and self._group == 0
        self.activations = self._allocate()
        shapes: list[Shape] = [*prefill_shapes(self._group), *(wgmma_shapes() if self._wgmma else ())]
        self._products = {shape: load(shape.spec()) for shape in shapes}
        orders = (False, True) if self._wgmma else (False,)
        quantise = {
            shape: load(shape.spec())
            for shape in (QuantiseShape(False, norm, order) for norm in {True, config.sub_norms} for order in orders)
        }
        append = load(specs.append(config.head_dim, config.qk_norm))
        attention = load(specs.attention(config.head_dim, "float32"))
        self._embed = self.bind_embed(load(specs.EMBED), self.activations.residual)
        bind = partial(self._bind_layer, quantise=quantise, append=append, attention=attention)
        self.layers = tuple(bind(layer) for layer in range(config.num_hidden_layers))

    def launch(self, tokens: int, start: int) -> None:
        """Launch what a chunk takes; what follows the last layer's keys and values is for the head alone."""
        chosen = {kind: self.choose(kind, tokens) for kind in LAYER_MATRICES}
        append, attention = self.append_ctas(tokens), self.attention_ctas(tokens)
        self._embed.launch(tokens)
        for layer in self.layers:
            layer.product("qkv", tokens, chosen["qkv"])
            layer.append.launch(append, tokens, start)
            if layer is self.layers[-1]:
                return
            layer.attention.launch(attention, tokens, start)
            layer.product("out", tokens, chosen["out"])
            layer.product("gate_up", tokens, chosen["gate_up"])
            layer.product("down", tokens, chosen["down"])

    def choose(self, kind: MatrixKind, tokens: int) -> Shape:
        """Return the shape of a product with that many tokens."""
        strips = self.layout.matrices[kind, 0].row_tiles
        if self._wgmma and tokens >= LEAST_TOKENS:
            return choose_wgmma(strips, tokens, sms=self._sms)
        return choose_prefill(strips, tokens, group=self._group, sms=self._sms)

    def _allocate(self) -> _Activations:
        config, zeros = self.config, self.zeros
        hidden, q, inner = config.hidden_size, config.q_size, config.intermediate_size
        return _Activations(
            residual=zeros(hidden, torch.float32),
            qkv=zeros(q + 2 * config.kv_size, torch.float32),
            queries=zeros(q, torch.bfloat16).view(self.chunk_tokens, -1, config.head_dim),
            mixed=zeros(q, torch.float32),
            inner=zeros(inner, torch.float32),
            quantised=zeros(_widest(config), torch.int8).flatten(),
            inverse=zeros(1, torch.float32).flatten(),
            sums=zeros(1, torch.int32).flatten(),
        )

    def _bind_layer(
        self,
        layer: int,
        quantise: dict[QuantiseShape, BindableKernel],
        append: BindableKernel,
        attention: BindableKernel,
    ) -> Layer:
        config, constants, acts = self.config, self.layout.constants, self.activations

        def bind_quantise(kind: MatrixKind, shape: QuantiseShape, norm: int | None) -> Bound:
            x, columns = self._input(kind), self._quantised_columns(kind, shape.ordered)
            weight = acts.inverse if norm is None else self.packed.norm(norm, x.shape[1])
            args: list[Arg] = [x, weight, self._quantised(columns), acts.inverse, acts.sums, x.shape[1], columns]
            return quantise[shape].bind(shape.threads, [*args, config.rms_norm_eps], shared_bytes=shape.shared_bytes)

        norms: dict[MatrixKind, int | None] = {
            "qkv": constants.attention_norms[layer],
            "out": constants.attention_sub_norms[layer] if config.sub_norms else None,
            "gate_up": constants.mlp_norms[layer],
            "down": constants.mlp_sub_norms[layer] if config.sub_norms else None,
        }
        return Layer(
            {
                (kind, shape.ordered): bind_quantise(kind, shape, norm)
                for kind, norm in norms.items()
                for shape in quantise
                if shape.norm is (norm is not None)
            },
            self.bind_append(append, layer, acts.qkv, acts.queries),
            self.bind_attention(attention, layer, acts.queries, acts.mixed),
            {
                (kind, shape): self._bind_product(kind, layer, shape)
                for kind in LAYER_MATRICES
                for shape in self._products
            },
            {kind: self.layout.matrices[kind, 0].row_tiles for kind in LAYER_MATRICES},
        )

    def _input(self, kind: MatrixKind) -> torch.Tensor:
        """Return what a product takes, before it is int8."""
        acts = self.activations
        return {"out": acts.mixed, "down": acts.inner}.get(kind, acts.residual)

    def _quantised_columns(self, kind: MatrixKind, ordered: bool) -> int:
        columns = self._input(kind).shape[1]
        return ordered_columns(columns) if ordered else columns

    def _quantised(self, columns: int) -> torch.Tensor:
        """Return the int8 values of the product at hand, (room, columns): all products take turns with their place."""
        return self.activations.quantised[: self.chunk_tokens * columns].view(-1, columns)

    def _bind_product(self, kind: MatrixKind, layer: int, shape: Shape) -> Bound:
        acts, place = self.activations, self.layout.matrices[kind, layer]
        out, result = {
            "qkv": (acts.qkv, "store"),
            "out": (acts.residual, "add"),
            "gate_up": (acts.inner, self.config.hidden_act),
            "down": (acts.residual, "add"),
        }[kind]
        ordered = isinstance(shape, WgmmaShape)
        weight, columns = self.packed.ternary(kind, layer), self._quantised_columns(kind, ordered)
        args: list[Arg] = [weight.codes, weight.scales.view(-1), self._quantised(columns), acts.inverse]
        if ordered:
            args.append(acts.sums)
        args += [out, place.tile_bytes, place.rows, 1, columns, specs.RESULTS[result]]
        shared_bytes = shape.shared_bytes(place.k_units)
        return self._products[shape].bind(shape.threads, args, shared_bytes=shared_bytes, changing=("tokens",))


@dataclass(frozen=True, slots=True)
class Layer:
    """The prepared launches of one layer; products in every shape, quantisation in every order that may be chosen."""

    quantise: dict[tuple[MatrixKind, bool], Bound]
    append: Bound
    attention: Bound
    products: dict[tuple[MatrixKind, Shape], Bound]
    strips: dict[MatrixKind, int]

    def product(self, kind: MatrixKind, tokens: int, shape: Shape) -> None:
        """Quantise what a matrix is multiplied with, and multiply."""
        self.quantise[kind, isinstance(shape, WgmmaShape)].launch(tokens)
        self.products[kind, shape].launch(shape.grid(self.strips[kind], tokens), tokens)
