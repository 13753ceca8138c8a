"""Several projections of one input as one matrix, each with its own scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onekernel.errors import ModelError
from onekernel.weights.ternary.matrix import TernaryMatrix


def fuse(matrices: Sequence[TernaryMatrix]) -> TernaryMatrix:
    """Return the matrices one under another; if one has group scales, all get them.

    Raises ModelError for groups of two sizes.
    """
    if len(matrices) == 1:
        return matrices[0]
    groups = {matrix.group for matrix in matrices if matrix.group is not None}
    if len(groups) > 1:
        raise ModelError(
            f"projections of one input have scales for groups of {' and '.join(map(str, sorted(groups)))} columns; "
            "they must have groups of one size: convert the model again"
        )
    group = next(iter(groups), None)
    codes = torch.cat([matrix.codes for matrix in matrices])
    if group is None:
        scales = torch.cat([matrix.scales for matrix in matrices])
        return TernaryMatrix(codes, scales, tuple(count for matrix in matrices for count in matrix.rows))
    return TernaryMatrix(codes, torch.cat([by_group(matrix, group).scales for matrix in matrices]), group=group)


def by_group(matrix: TernaryMatrix, group: int) -> TernaryMatrix:
    """Return the same matrix with scales for groups of `group` columns, or itself if it has them."""
    if matrix.group is not None:
        return matrix
    groups = matrix.shape[1] // group
    return TernaryMatrix(matrix.codes, matrix.row_scales()[:, None].repeat(1, groups), group=group)
