"""The paged KV cache: 64-token pages for each layer and KV head, keys then values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.config import PAGE_TOKENS, ModelConfig

_KEYS, _VALUES = 0, 1


@dataclass(frozen=True, slots=True)
class KVCache:
    """Pages of keys and values; page tables belong to the sequences.

    pages: (num_hidden_layers, num_pages, num_key_value_heads, 2, PAGE_TOKENS, head_dim). A slot that was never
    appended holds anything, NaN included: readers touch only the positions they are told of.
    """

    pages: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: str) -> KVCache:
        """Reserve memory for `num_pages` pages in every layer, not initialised."""
        shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, 2, PAGE_TOKENS, config.head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device))

    @property
    def num_pages(self) -> int:
        """Pages in each layer."""
        return self.pages.shape[1]

    def append(
        self, layer: int, page_table: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values, (tokens, num_key_value_heads, head_dim) each, at positions from `start` on."""
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
        both = chosen.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :length]
        return both[_KEYS], both[_VALUES]
