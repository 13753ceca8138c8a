"""Launches of the prefill kernels on random inputs in poisoned memory, with what float64 makes of the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, BindableKernel, Kernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.packed_prefill import PackedPrefill
from onekernel.kernels.prefill import specs
from onekernel.kernels.prefill.variants import Variant
from onekernel.models.model import Model, Place, Weights
from onekernel.models.packed import PackedModel, pack
from onekernel.phases.attention.cache import KVCache, places
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.gate_up.reference import activate
from onekernel.phases.norm import rms_norm
from onekernel.weights.arena import TileRows, weight_layout
from onekernel.weights.dense import PackedDense

Load = Callable[[KernelSpec], Kernel]

SUMS = 1e-5
"""Relative L2 of float32 sums of exact products; the tensor cores truncate where they align the addends."""
ROUNDED = 3e-3
"""Relative L2 of values rounded to bf16 once: 2^-9 / sqrt(3) on average, and some in what they came from."""
ATTENDED = 4e-3
"""Relative L2 of attention: its weights and its results are rounded to bf16."""

SPARE = 3
"""Rows past the last token in every buffer, which hold NaN and must stay so."""


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2; NaN in `found` makes it NaN, which no limit allows."""
    return float((found.double().cpu() - wanted.double()).norm() / wanted.double().norm())


@dataclass(frozen=True, slots=True)
class ProductCase:
    """A product and what it is for; `result` as in `specs.RESULTS`."""

    tokens: int
    rows: int
    columns: int
    result: str = "store"
    bias: bool = False
    seed: int = 0

    def run(self, kernel: Kernel, variant: Variant, tile_rows: int, device: torch.device) -> torch.Tensor:
        """Return the tokens' results after checking that nothing else was written."""
        x, packed, constants, _ = self._inputs(tile_rows)
        row_tiles, k_units, _ = packed.tiles.shape
        padded = row_tiles * tile_rows
        out = poisoned(self.tokens + SPARE, padded)
        if self.result == "add":
            out[: self.tokens] = _before(padded)
        inner = poisoned(self.tokens + SPARE, padded // 2 + 2, dtype=torch.bfloat16)
        # The matrix stands in the middle of an arena; what is around it must not be read as weights.
        arena = torch.full((packed.tiles.nbytes + 2048,), 0xFF, dtype=torch.uint8)
        arena[1024:-1024] = packed.tiles.view(torch.uint8).reshape(-1)
        out, inner = out.to(device), inner.to(device)
        args: list[Arg] = [
            x.to(device),
            x.shape[1],
            self.tokens,
            arena.to(device),
            1024,
            k_units * 8 // tile_rows,
            row_tiles,
            constants.to(device),
            5 if self.bias else 0,
            specs.RESULTS[self.result],
            out,
            padded,
            inner,
            inner.shape[1],
        ]
        ctas = variant.ctas(self.tokens, padded)
        kernel.launch(ctas, variant.threads, args, shared_bytes=variant.shared_bytes)
        out, inner = out.cpu(), inner.cpu()
        gated = self.result not in ("store", "add")
        assert (out if gated else inner).isnan().all()
        assert out[self.tokens :].isnan().all()
        assert inner[self.tokens :].isnan().all()
        assert inner[:, padded // 2 :].isnan().all()
        return inner[: self.tokens, : padded // 2] if gated else out[: self.tokens, : self.rows]

    def wanted(self, tile_rows: int) -> torch.Tensor:
        """Return the results in float64."""
        x, packed, constants, weight = self._inputs(tile_rows)
        padded = packed.tiles.shape[0] * tile_rows
        sums = torch.zeros(self.tokens, padded, dtype=torch.float64)
        sums[:, : self.rows] = x[:, : self.columns].double() @ weight.double().T
        if self.bias:
            sums += constants[4 : 4 + padded].double()
        if self.result in ("store", "add"):
            return (sums + _before(padded) * (self.result == "add"))[:, : self.rows]
        gate, up = sums.view(self.tokens, -1, 2, tile_rows // 2).unbind(2)
        return (activate(gate, self.result) * up).reshape(self.tokens, -1)  # type: ignore[arg-type]

    def _inputs(self, tile_rows: int) -> tuple[torch.Tensor, PackedDense, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        weight = (torch.randn(self.rows, self.columns, generator=generator) * self.columns**-0.5).bfloat16()
        packed = PackedDense.pack(weight, tile_rows)
        x = torch.zeros(self.tokens, packed.tiles.shape[1] * 512 // tile_rows, dtype=torch.bfloat16)
        x[:, : self.columns] = torch.randn(self.tokens, self.columns, generator=generator).bfloat16()
        padded = packed.tiles.shape[0] * tile_rows
        constants = poisoned(padded + 8)
        constants[4 : 4 + padded] = torch.randn(padded, generator=generator)
        return x, packed, constants, weight


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads, and a sequence in a cache with scattered pages."""

    head_dim: int
    heads: int
    kv_heads: int
    start: int
    tokens: int

    @property
    def table(self) -> torch.Tensor:
        """The sequence's pages."""
        count = -(-(self.start + self.tokens) // 64)
        return torch.randperm(count + 2, generator=torch.Generator().manual_seed(5))[:count].int()

    def attend(self, kernel: Kernel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention.cu makes of random queries, and float64 attention of the same."""
        generator = torch.Generator().manual_seed(self.head_dim)
        end = self.start + self.tokens
        keys, values = torch.randn(2, end, self.kv_heads, self.head_dim, generator=generator).bfloat16()
        table = self.table
        pages = poisoned(len(table) + 2, self.kv_heads, 2, 64, self.head_dim, dtype=torch.bfloat16)
        for position in range(end):
            order = places(self.head_dim)[position % 64]
            pages[table[position // 64], :, 0, position % 64] = keys[position][..., order]
            pages[table[position // 64], :, 1, position % 64] = values[position][..., order]
        queries = poisoned(self.tokens + SPARE, self.heads, self.head_dim, dtype=torch.bfloat16)
        queries[: self.tokens] = torch.randn(self.tokens, self.heads, self.head_dim, generator=generator)
        size = self.heads * self.head_dim
        mixed = poisoned(self.tokens + SPARE, size + 8, dtype=torch.bfloat16).to(device)
        args: list[Arg] = [
            queries.to(device),
            self.heads,
            self.tokens,
            self.start,
            math.log2(math.e) / math.sqrt(self.head_dim),
            table.to(device),
            pages.to(device),
            self.kv_heads,
            mixed,
            size + 8,
        ]
        ctas = self.heads * -(-self.tokens // specs.ATTENTION_QUERIES)
        shared_bytes = specs.attention_shared_bytes(self.head_dim)
        kernel.launch(ctas, specs.ATTENTION_THREADS, args, shared_bytes=shared_bytes)
        mixed = mixed.cpu()
        assert mixed[self.tokens :].isnan().all()
        assert mixed[:, size:].isnan().all()
        allowed = torch.ones(self.tokens, end, dtype=torch.bool).tril(self.start)
        wanted = F.scaled_dot_product_attention(
            queries[: self.tokens].transpose(0, 1).double()[None],
            keys.transpose(0, 1).double()[None],
            values.transpose(0, 1).double()[None],
            attn_mask=allowed,
            enable_gqa=True,
        )
        return mixed[: self.tokens, :size], wanted[0].transpose(0, 1).reshape(self.tokens, size)


def _before(rows: int) -> torch.Tensor:
    """What a residual holds before a product is added."""
    return torch.arange(rows) / 8


class Rounded:
    """A bf16 matrix whose products are made in bf16 on a CPU too, as they are on a GPU."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def linear(self, x: torch.Tensor, /) -> torch.Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight).float()

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor:
        return self.linear(rms_norm(x, weight, eps))


class InBf16:
    """The same weights, multiplied in bf16."""

    dtype = torch.bfloat16

    def __init__(self, weights: Weights) -> None:
        self.embedding, self.final_norm, self.head = weights.embedding, weights.final_norm, weights.head
        names = ("qkv", "out", "gate_up", "down")
        self.layers = [
            replace(layer, **{name: Rounded(getattr(layer, name)) for name in names}) for layer in weights.layers
        ]


@dataclass(slots=True)
class Whole:
    """A model packed for the prefill kernels, and the caches that they and others fill."""

    config: ModelConfig
    weights: Weights
    packed: PackedModel
    context: int = 256

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights, tile_rows: int = 8, context: int = 256) -> Whole:
        """Pack a model's weights in tiles of 4 or 8 rows."""
        rows = TileRows(tile_rows, tile_rows, tile_rows, tile_rows)  # type: ignore[arg-type]
        layout = weight_layout(config, rows, context_tokens=context)
        return cls(config, weights, pack(weights, config, layout), context)  # type: ignore[arg-type]

    @property
    def table(self) -> torch.Tensor:
        """Scattered pages for the whole context."""
        count = self.context // 64
        return torch.randperm(count + 1, generator=torch.Generator().manual_seed(3))[:count]

    def cache(self, dtype: torch.dtype = torch.bfloat16) -> KVCache:
        """A cache of NaN."""
        device = str(self.packed.arena.device)
        cache = KVCache.allocate(self.config, self.context // 64 + 1, dtype, device)
        cache.pages.fill_(torch.nan)
        return cache

    def prefill(
        self, load: Callable[[KernelSpec], BindableKernel], variants: Sequence[Variant], sms: int = 4
    ) -> PackedPrefill:
        """The kernels on a cache of NaN, with activations of NaN but for the padding that must be zero."""
        prefill = PackedPrefill(self.packed, self.cache(), load, sms=sms, variants=variants)
        acts, inner_rows = prefill.activations, self.packed.layout.matrices["gate_up", 0].padded_rows // 2
        for values in (acts.residual, acts.normed, acts.qkv, acts.queries):
            values.fill_(torch.nan)
        acts.mixed[:, : self.config.q_size] = torch.nan
        acts.inner[:, :inner_rows] = torch.nan
        return prefill

    def filled(self, prefill: PackedPrefill, ids: Sequence[int], cuts: Sequence[int] = ()) -> torch.Tensor:
        """Return keys and values of all layers after a prefill that is cut in pieces at `cuts`."""
        ends = [*cuts, len(ids)]
        for start, end in zip([0, *cuts], ends, strict=True):
            prefill.run(ids[start:end], self.table, start)
        return self.read(prefill.cache, len(ids))

    def read(self, cache: KVCache, tokens: int) -> torch.Tensor:
        """Return (layers, 2, kv_heads, tokens, head_dim) on the CPU, after checking that no other slot was written."""
        table, layers = self.table, range(self.config.num_hidden_layers)
        last = cache.pages[:, table[(tokens - 1) // 64], :, :, (tokens - 1) % 64 + 1 :]
        unused = torch.ones(cache.num_pages, dtype=torch.bool)
        unused[table[: -(-tokens // 64)]] = False
        assert last.isnan().all()
        assert cache.pages[:, unused.to(cache.pages.device)].isnan().all()
        return torch.stack([torch.stack(cache.read(layer, table, tokens)) for layer in layers]).cpu()

    def reference(self, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
        """Return the same by the phases' references with these weights."""
        device = self.packed.arena.device
        cache, rope = self.cache(weights.dtype), rope_table(self.config, self.context).to(device)
        Model(self.config, weights).extend(ids, Place(cache, self.table, rope, 0))
        return self.read(cache, len(ids))
