"""Draw a token: the highest score after adding Gumbel noise, which is a draw from softmax(scores).

Gumbel-max: Maddison, Tarlow, Minka, "A* sampling", NeurIPS 2014. An argmax needs no normaliser and no running sum, so
any partition of the vocabulary over processors gives the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onekernel.phases.choose.elementary import gumbel, uniform
from onekernel.phases.choose.filters import Kept
from onekernel.phases.choose.philox import words


def draw(kept: Kept, seed: int, position: int) -> int:
    """Return the token drawn for a position of the sequence; of equal sums the lowest id."""
    v = uniform(words(seed, position, kept.token_ids))
    # The library's logarithms take a tenth of the time of `gumbel`. They name the contenders, `gumbel` decides.
    rough = kept.scores - (-torch.log1p(-v)).log()
    best = float(rough.max())
    contenders = (rough >= best - (1e-4 + 1e-6 * abs(best))).nonzero()[:, 0]
    sums = kept.scores[contenders] + gumbel(v[contenders])
    return int(kept.token_ids[contenders[sums.argmax()]])


def draw_many(kept: Kept, seed: int, positions: Tensor) -> Tensor:
    """Return the tokens `draw` gives at each of many positions, int64 (p,), from the same scores.

    It holds p x len(kept) words at once: meant for small vocabularies and for tests of the distribution.
    """
    sums = kept.scores + gumbel(uniform(words(seed, positions[:, None], kept.token_ids)))
    return kept.token_ids[sums.argmax(-1)]
