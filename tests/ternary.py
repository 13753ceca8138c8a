"""Random ternary matrices and activations, and what integers make of them: the oracle of every kernel and operator."""

from __future__ import annotations

import torch

from onekernel.weights.ternary.matrix import TernaryMatrix


def random_matrix(n: int, k: int, seed: int = 0, rows: tuple[int, ...] = (), group: int | None = None) -> TernaryMatrix:
    """Random codes; scales that differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=generator)
    shape = (len(rows or (n,)),) if group is None else (n, k // group)
    return TernaryMatrix(codes, torch.rand(shape, generator=generator) + 0.5, rows, group)


def random_activations(tokens: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values over their whole range, and for each token what they were multiplied by, float32."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randint(-127, 128, (tokens, k), dtype=torch.int8, generator=generator)
    return x, torch.rand(tokens, generator=generator) + 0.01


def integer_sums(x: torch.Tensor, matrix: TernaryMatrix) -> torch.Tensor:
    """Return the exact sums: (tokens, N) int64, or with groups (tokens, N, groups)."""
    n, k = matrix.shape
    group = matrix.group or k
    x_groups, codes = x.long().view(-1, k // group, group), matrix.codes.long().view(n, k // group, group)
    sums = torch.einsum("tgk,ngk->tng", x_groups, codes)
    return sums if matrix.group else sums[:, :, 0]
