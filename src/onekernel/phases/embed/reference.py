"""Reference of the embed phase."""

from __future__ import annotations

import torch


def embed(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the residual (tokens, hidden_size) in float32 for token_ids (tokens,) int64 and table (vocab, hidden)."""
    return table[token_ids].float()
