"""Which way a feed-forward is trained. Both ways are exact; this is about time only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onekernel.errors import ConfigError
from onekernel.ops.sparsity_stats import LayerSparsity

TrainingRouteName = Literal["dense", "sparse"]

HOT_MULTIPLE = 256

PROMISE = 0.85
"""The share of the dense way's time under which the sparse way is taken: predictions err, and dense is never wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRoute:
    """dense: PyTorch's products. sparse: kernels that touch active neurons only, but for the `hot` ones.

    hot: (any number,) int64 on the weights' device, each neuron once; they are multiplied densely. None: no neuron is.
    """

    name: TrainingRouteName = "dense"
    hot: Tensor | None = None

    def __post_init__(self) -> None:
        if self.name not in ("dense", "sparse"):
            raise ConfigError(f"route is {self.name!r}; it must be dense or sparse")
        if self.hot is not None and (self.name == "dense" or self.hot.dtype is not torch.int64 or self.hot.dim() != 1):
            raise ConfigError(
                f"hot neurons are {self.hot.dtype} {tuple(self.hot.shape)} on route {self.name}; they must be a vector "
                f"of int64 on the sparse route"
            )


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Microseconds of the parts of a step of one feed-forward, forward and backward, on one GPU.

    The defaults are predictions for an H200: 4.8 ms for 16,384 tokens through 2048 x 5632 densely, as torch.compile was
    measured (4.75 to 4.96), the rest from bytes and published rates; `benchmarks/training.py` measures the sums.
    """

    flop_per_us: float = 750e6
    memory_bytes_per_us: float = 4.3e6
    gathered_bytes_per_us: float = 5.0e6
    call_us: float = 900.0
    """The host's time for 38 to 78 launches, 15 us each, bit masks both ways, and the down projection turned around
    twice. 15 us: with 164 launches a step took 2.4 to 2.65 ms longer than the rest here predicts, at 0.5, 1 and 2 %."""

    def dense(self, tokens: int, hidden: int, neurons: int, gated: bool) -> float:
        """Return the time of all products of some neurons, and of what lies between them."""
        matrices = 3 if gated else 2
        return (
            6 * matrices * tokens * hidden * neurons / self.flop_per_us
            + 4 * matrices * tokens * neurons / self.memory_bytes_per_us
        )

    def hot(self, tokens: int, hidden: int, neurons: int, gated: bool) -> float:
        """Return the time of some neurons beside the sparse way: a second product is made again in the backward."""
        again = 2 * tokens * hidden * neurons / self.flop_per_us if gated else 0.0
        return self.dense(tokens, hidden, neurons, gated) + again

    def sparse(self, tokens: int, hidden: int, neurons: int, nonzeros: float, gated: bool) -> float:
        """Return the time of the first product of all neurons, and of kernels for so many nonzeros."""
        first = 2 * tokens * hidden * neurons / self.flop_per_us + 4 * tokens * neurons / self.memory_bytes_per_us
        rows = 7 if gated else 5
        return self.call_us + first + nonzeros * rows * 2 * hidden / self.gathered_bytes_per_us


H200 = TrainingCosts()


def choose_route(
    seen: LayerSparsity, tokens: int, hidden: int, *, gated: bool = True, costs: TrainingCosts = H200
) -> TrainingRoute:
    """Return the fastest way for calls of `tokens` tokens like those that were seen; dense where no neuron was counted.

    How much is active is the mean of all tokens that were seen; its shares by neuron are those that were counted.
    The hot neurons are on the CPU: move them to the weights' device once.
    """
    neurons = len(seen.neuron_counts)
    counted = int(seen.neuron_counts.sum())
    if seen.tokens == 0 or (counted == 0 and seen.mean > 0):
        return TrainingRoute()
    best, route = PROMISE * costs.dense(tokens, hidden, neurons, gated), TrainingRoute()
    counts, order = seen.neuron_counts.sort(descending=True, stable=True)
    in_hot = torch.cat([torch.zeros(1), counts.double().cumsum(0)]) * (tokens * seen.mean / max(counted, 1))
    for hot in range(0, neurons, HOT_MULTIPLE):
        cold = float(in_hot[-1] - in_hot[hot])
        time = costs.sparse(tokens, hidden, neurons, cold, gated)
        time += costs.hot(tokens, hidden, hot, gated)
        if time < best:
            best, route = time, TrainingRoute("sparse", order[:hot].sort()[0] if hot else None)
    return route
