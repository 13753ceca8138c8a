"""What prefills by kernels share: a chunk's tokens, its checks, and the launches that take no weights of products.

A token's keys and values have the same bits whatever comes with it: no kernel's arithmetic for a token depends on the
other tokens of the chunk, on their number, or on where the chunk begins. So a prompt may be cut anywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from onekernel.device.kernel import Arg, BindableKernel, Bound
from onekernel.device.spec import KernelSpec
from onekernel.errors import ConfigError
from onekernel.kernels.prefill import specs
from onekernel.models.packed import PackedModel
from onekernel.phases.attention.cache import KVCache

Load = Callable[[KernelSpec], BindableKernel]


class ChunkPrefill(ABC):
    """A prefill of one packed model into one cache. A subclass binds the rest of a layer and says what is launched."""

    def __init__(self, packed: PackedModel, cache: KVCache, chunk_tokens: int) -> None:
        self.cache, self.packed, self.config, self.layout = cache, packed, packed.config, packed.layout
        self.device = packed.arena.device
        self.chunk_tokens = min(chunk_tokens, packed.layout.constants.context_tokens)
        self.ids = torch.zeros(self.chunk_tokens, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(cache.num_pages, dtype=torch.int32, device=self.device)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], page_table: torch.Tensor, start: int) -> None:
        """Append keys and values of 1 to `chunk_tokens` tokens from position `start` on; on a GPU, only start to.

        page_table: the sequence's pages, at least those of all positions so far, whole numbers on any device. Raises
        ConfigError for more tokens, and for positions past the context.
        """
        tokens, context = len(token_ids), self.layout.constants.context_tokens
        if not 1 <= tokens <= self.chunk_tokens or not 0 <= start <= context - tokens:
            raise ConfigError(
                f"{tokens} tokens from position {start} on are no chunk; it has 1 to {self.chunk_tokens} tokens and "
                f"ends within the context of {context}"
            )
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:
            self.ids[:tokens].copy_(torch.tensor(token_ids, dtype=torch.int32))
            self._table[: len(page_table)].copy_(page_table)
            self.launch(tokens, start)

    @abstractmethod
    def launch(self, tokens: int, start: int) -> None:
        """Launch what a chunk takes, whose ids and pages are there; torch's current device is the prefill's."""

    def zeros(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return (chunk_tokens, columns) of zeros."""
        return torch.zeros(self.chunk_tokens, columns, dtype=dtype, device=self.device)

    def bind_embed(self, kernel: BindableKernel, residual: torch.Tensor) -> Bound:
        """Prepare the launch that begins the residual, (room, columns) float32."""
        layout = self.layout
        args: list[Arg] = [
            self.ids,
            self.packed.arena,
            layout.embedding_bytes,
            layout.head.tile_rows if layout.embed_packed else 0,
            layout.head.k_units,
            self.config.hidden_size,
            residual,
            residual.shape[1],
        ]
        return kernel.bind(specs.EMBED_THREADS, args)

    def bind_append(self, kernel: BindableKernel, layer: int, qkv: torch.Tensor, queries: torch.Tensor) -> Bound:
        """Prepare QK-norm, RoPE and the append of a layer, launched with tokens and start."""
        config, constants = self.config, self.layout.constants
        own_norms = layer * config.head_dim if config.qk_norm else 0
        args: list[Arg] = [
            qkv,
            qkv.shape[1],
            1,
            0,
            config.num_attention_heads,
            config.num_key_value_heads,
            self.packed.constants,
            constants.rope,
            constants.q_norm + own_norms,
            constants.k_norm + own_norms,
            config.rms_norm_eps,
            self._table,
            self.cache.pages[layer],
            queries,
        ]
        return kernel.bind(specs.APPEND_THREADS, args, changing=("tokens", "start"))

    def bind_attention(self, kernel: BindableKernel, layer: int, queries: torch.Tensor, mixed: torch.Tensor) -> Bound:
        """Prepare a layer's attention, launched with tokens and start."""
        config = self.config
        args: list[Arg] = [
            queries,
            config.num_attention_heads,
            1,
            0,
            math.log2(math.e) / math.sqrt(config.head_dim),
            self._table,
            self.cache.pages[layer],
            config.num_key_value_heads,
            mixed,
            mixed.shape[1],
        ]
        shared_bytes = specs.attention_shared_bytes(config.head_dim)
        return kernel.bind(specs.ATTENTION_THREADS, args, shared_bytes=shared_bytes, changing=("tokens", "start"))

    def append_ctas(self, tokens: int) -> int:
        """Return the grid of `bind_append`'s launch."""
        vectors = tokens * (self.config.num_attention_heads + 2 * self.config.num_key_value_heads)
        return -(-vectors // specs.APPEND_VECTORS)

    def attention_ctas(self, tokens: int) -> int:
        """Return the grid of `bind_attention`'s launch."""
        return self.config.num_attention_heads * -(-tokens // specs.ATTENTION_QUERIES)
