"""Reference of the embed phase."""

from __future__ import annotations

from typing import Protocol

import torch


class Table(Protocol):
    """Rows of (hidden_size,) by token id: a tensor (vocab, hidden_size), or what finds them in packed weights."""

    def __getitem__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """Return the rows of these ids, (tokens, hidden_size)."""
        ...


def embed(token_ids: torch.Tensor, table: Table) -> torch.Tensor:
    """Return the residual (tokens, hidden_size) in float32 for token_ids (tokens,) int64."""
    return table[token_ids].float()
