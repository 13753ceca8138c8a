"""The paged KV cache: 64-token pages for each layer and KV head, keys then values.

Where heads are multiples of 64 values, a row keeps its chunks of 8 values in another order from token to token, so
that kernels read the same chunk of 8 tokens from different banks of shared memory; kernels/tile/page.cuh has the same
rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from onekernel.config import PAGE_TOKENS, ModelConfig

_KEYS, _VALUES = 0, 1
_CHUNK_VALUES = 8
_TURNS = 8
"""Tokens after which the orders come again."""
_WIDE_BYTES = 16


def is_permuted(head_dim: int) -> bool:
    """Return whether a page's rows keep their chunks in another order than that of the values."""
    return head_dim % (_CHUNK_VALUES * _TURNS) == 0


@cache
def places(head_dim: int, device: str = "cpu") -> torch.Tensor:
    """Return (PAGE_TOKENS, head_dim) int64: where a page's row keeps each value, and so which value each place has."""
    values = torch.arange(head_dim, device=device).expand(PAGE_TOKENS, head_dim)
    turns = torch.arange(PAGE_TOKENS, device=device)[:, None] % _TURNS if is_permuted(head_dim) else 0
    return values ^ turns * _CHUNK_VALUES


@cache
def _wide_places(head_dim: int, per_chunk: int, device: str) -> torch.Tensor:
    """Return the same for whole pages in pieces of 16 bytes, `per_chunk` of them a chunk: (pieces of a page,)."""
    chunks = places(head_dim, device)[:, ::_CHUNK_VALUES] // _CHUNK_VALUES
    chunks = chunks + torch.arange(PAGE_TOKENS, device=device)[:, None] * chunks.shape[1]
    return (chunks[:, :, None] * per_chunk + torch.arange(per_chunk, device=device)).flatten()


@dataclass(frozen=True, slots=True)
class KVCache:
    """Pages of keys and values; page tables belong to the sequences.

    pages: (num_hidden_layers, num_pages, num_key_value_heads, 2, PAGE_TOKENS, head_dim). A slot that was never
    appended holds anything, NaN included: readers touch only the positions they are told of.
    """

    pages: torch.Tensor
    plain: bool = False
    """Whether rows are kept as they are in any case: for pages that no kernel reads."""

    @property
    def permuted(self) -> bool:
        """Whether rows keep their chunks in another order, see `places`."""
        return not self.plain and is_permuted(self.pages.shape[-1])

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: str, *, plain: bool = False
    ) -> KVCache:
        """Reserve memory for `num_pages` pages in every layer, not initialised."""
        shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, 2, PAGE_TOKENS, config.head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), plain)

    @property
    def num_pages(self) -> int:
        """Pages in each layer."""
        return self.pages.shape[1]

    def append(
        self, layer: int, page_table: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values, (tokens, num_key_value_heads, head_dim) each, at positions from `start` on."""
        if self.permuted:
            slots = torch.arange(start, start + keys.shape[0], device=keys.device) % PAGE_TOKENS
            at = places(keys.shape[2], str(keys.device))[slots, None].expand(keys.shape)
            keys, values = keys.gather(2, at), values.gather(2, at)
        if keys.shape[0] == 1:  # plain slices: a third of the time of an indexed write, once a layer and token
            page = self.pages[layer, int(page_table[start // PAGE_TOKENS]), :, :, start % PAGE_TOKENS]
            page[:, _KEYS], page[:, _VALUES] = keys[0], values[0]
            return
        positions = torch.arange(start, start + keys.shape[0], device=self.pages.device)
        page = page_table.to(self.pages.device)[positions // PAGE_TOKENS]
        slot = positions % PAGE_TOKENS
        layer_pages = self.pages[layer]
        layer_pages[page, :, _KEYS, slot] = keys.to(layer_pages.dtype)
        layer_pages[page, :, _VALUES, slot] = values.to(layer_pages.dtype)

    def read(self, layer: int, page_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of positions 0 to length - 1: (num_key_value_heads, length, head_dim) each."""
        used = page_table[: -(-length // PAGE_TOKENS)].to(self.pages.device)
        chosen = self.pages[layer].index_select(0, used)  # (pages, heads, 2, PAGE_TOKENS, head_dim)
        if self.permuted:  # by 16 bytes at once
            rows = chosen.view(torch.complex128).flatten(3)
            per_chunk = _CHUNK_VALUES * chosen.element_size() // _WIDE_BYTES
            chosen = rows.index_select(3, _wide_places(chosen.shape[4], per_chunk, str(chosen.device)))
            chosen = chosen.view(self.pages.dtype).unflatten(3, (PAGE_TOKENS, -1))
        both = chosen.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return both[_KEYS], both[_VALUES]
