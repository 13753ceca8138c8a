"""The check that a ternary model multiplies as its files say: one block against an oracle, at every load.

A packing taken for another, scales inverted or given to other rows, or a kernel that reads another layout would give
fluent nonsense (microsoft/BitNet, issues 284 and 600). Here they give an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from onekernel.errors import ModelError
from onekernel.weights.ternary.checkpoint import TernaryCheckpoint

BLOCK_ROWS = 16
"""Rows of each projection that are looked at: the first half and the last."""

TOLERANCE = 4e-6
"""Of the sum of absolute terms. Sums are exact; float32 rounds the scale, the product and, with group scales, a sum."""

SCORES = (1e-5, 1e4)
"""Between what attention scores deviate from 0 in a model that works; beyond, it attends to everything or to one."""


def check_products(
    view: TernaryCheckpoint,
    names: Sequence[str],
    product: Callable[[torch.Tensor], torch.Tensor],
    device: str,
) -> None:
    """Raise ModelError if `product`, that of the fused matrix of `names`, is not that of the weights in the files."""
    columns = view.tensors[names[0]].shape[1]
    probe = torch.randint(-126, 127, (columns,), generator=torch.Generator().manual_seed(columns)).numpy()
    parts = []
    first = 0
    for name in names:
        count = view.tensors[name].shape[0]
        half = min(BLOCK_ROWS // 2, count)
        rows = sorted({*range(half), *range(count - half, count)})
        parts.append((name, [first + row for row in rows], view.oracle_rows(name, rows)))
        first += count
    weights = np.concatenate([rows for _, _, rows in parts])
    doubtful = np.isnan(weights).any(axis=0)
    probe[doubtful] = 0
    probe[np.flatnonzero(~doubtful)[:1]] = 127  # the largest value: quantising then changes nothing
    got = product(torch.from_numpy(probe).to(device, torch.float32)[None])[0].cpu().to(torch.float64).numpy()
    for name, rows, stated in parts:
        exact = np.where(doubtful, 0.0, stated)
        allowed = TOLERANCE * (np.abs(exact) @ np.abs(probe)) + 1e-30
        wrong = ~(np.abs(got[rows] - exact @ probe) <= allowed)  # what is no number is wrong too
        if wrong.any():
            raise ModelError(
                f"{name} of {view.settings.source} does not multiply as its file says ({int(wrong.sum())} of "
                f"{len(rows)} rows looked at differ): its packing or its scales "
                "were read wrongly; please report this model"
            )


def check_convention(view: TernaryCheckpoint, q_name: str, k_name: str, norm: torch.Tensor) -> None:
    """Raise ModelError if packed scales make no sense as the config states them, but do the other way round.

    The sizes of q and k follow from the norm's weights (hidden_size,), the scale and the share of codes that are not 0;
    their product is the size of the first layer's attention scores. Not for models that norm q and k.
    """
    stated, inverted = 1.0, 1.0
    for name in (q_name, k_name):
        matrix = view.ternary(name)
        width = float(norm.square().mean().sqrt()) * math.sqrt(matrix.codes.count_nonzero() / matrix.shape[0])
        scale = float(matrix.scales.mean())
        stated, inverted = stated * width * scale, inverted * width / max(scale, torch.finfo(torch.float32).tiny)
    low, high = SCORES
    if not low < stated < high and low < inverted < high:
        other = "bitlinear" if view.convention == "multiply" else "autobitlinear"
        raise ModelError(
            f"{view.settings.source}: config.json says to {view.convention} by weight_scale, which gives attention "
            f"scores of about {stated:.0e}; the other way round they are about {inverted:.0e}. The config's "
            f'quantization_config.linear_class is wrong: "{other}" it must be'
        )
