"""Reference of the combine phase: the merge of a split cache's partial results.

Online softmax (Milakov, Gimelshein, 2018), split over keys as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import torch


def combine(sums: torch.Tensor, maxima: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the attention's output (heads, head_dim) from that of the parts of the cache, float32.

    sums: (parts, heads, head_dim), values weighted by exp(score - maximum of the part), not normalised; maxima and
    weights: (parts, heads), the part's largest score and the sum of its weights.
    """
    shrink = torch.exp(maxima - maxima.amax(dim=0))
    return (sums * shrink[..., None]).sum(dim=0) / (weights * shrink).sum(dim=0)[..., None]
