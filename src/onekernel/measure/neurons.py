"""How many neurons of each feed-forward are active while a model reads a text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerNeurons:
    """One layer over the tokens of a text. A neuron is active where activate(gate) * up is not exactly zero."""

    layer: int
    mean: float
    """Active neurons of a token."""
    most: int
    """Active neurons of the fullest token."""
    never: int
    """Neurons that no token activated."""
    percent: float
    """The mean, of all neurons."""


def active_neurons(parts: Iterable[tuple[int, torch.Tensor]]) -> list[LayerNeurons]:
    """Return what was active by layer, from (layer, values of (tokens, intermediate_size)) in any number of parts."""
    counts: dict[int, list[torch.Tensor]] = {}
    seen: dict[int, torch.Tensor] = {}
    for layer, values in parts:
        active = values != 0  # also where a value is not a number: broken weights are seen and not skipped
        counts.setdefault(layer, []).append(active.sum(1).cpu())
        fired = active.any(0)
        seen[layer] = seen[layer] | fired if layer in seen else fired
    found = []
    for layer, fired in sorted(seen.items()):
        by_token = torch.cat(counts[layer])
        mean, neurons = float(by_token.double().mean()), len(fired)
        never = neurons - int(fired.sum())
        found.append(LayerNeurons(layer, mean, int(by_token.max()), never, 100 * mean / neurons))
    return found
