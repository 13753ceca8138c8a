"""Which tokens a step sees: a function of seed and step alone, so that a resumed run sees what it would have seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from onekernel.train.corpus import TokenFile


class Pieces:
    """Training pieces of `context` + 1 tokens in an order drawn anew for each epoch; an epoch sees each token once."""

    def __init__(self, tokens: TokenFile, context: int, batch: int, seed: int) -> None:
        self._tokens, self._context, self._batch, self._seed = tokens, context, batch, seed
        self.per_epoch = (len(tokens) - 1) // context
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
        """Return this process's part of a step's batch, (batch / world, context + 1) int64."""
        numbers = range(step * self._batch + rank, (step + 1) * self._batch, world)
        return torch.stack([self._piece(number) for number in numbers])

    def _piece(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self.per_epoch)
        return _cut(self._tokens, int(self._order[place]) * self._context, self._context)


def held_out_batches(
    tokens: TokenFile, context: int, most: int, size: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (pieces, how many of them count) over the first `most` pieces, in as many turns on every process.

    A process that has none left in a turn gets one that does not count, because sharded models compute in step.
    """
    pieces = min((len(tokens) - 1) // context, most)
    for start in range(0, pieces, size * world):
        numbers = range(start + rank, min(start + size * world, pieces), world)
        yield torch.stack([_cut(tokens, number * context, context) for number in numbers or range(1)]), len(numbers)


def _cut(tokens: TokenFile, start: int, context: int) -> torch.Tensor:
    return torch.from_numpy(tokens[start : start + context + 1].astype(np.int64))
