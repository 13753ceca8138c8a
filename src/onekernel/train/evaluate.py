"""Loss and sparsity on the held-out text, the same whatever the number of processes."""

from __future__ import annotations

import math
from typing import Any

import torch

from onekernel.errors import NumericError
from onekernel.train.corpus import TokenFile
from onekernel.train.feed_forward import Tally
from onekernel.train.model import SparseLlama
from onekernel.train.pieces import held_out_batches
from onekernel.train.record import HeldOutReport
from onekernel.train.settings import Settings
from onekernel.train.world import World


@torch.no_grad()
def evaluate(
    model: SparseLlama, tokens: TokenFile, settings: Settings, world: World, *, step: int, activation: Any
) -> HeldOutReport:
    """Return the model's report over the first `evaluate_pieces` pieces that do not overlap; each token counts once.

    Every process must call it. Raises NumericError if the loss is not finite.
    """
    context, run = settings.data.context, settings.run
    size = run.micro_batch or run.batch // world.size
    layers, inner = model.layers, model.config.intermediate_size
    tallies = [Tally.zero(inner, world.device) for _ in layers]
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    before = layers[0].mlp.activation
    model.set_activation(activation)
    model.eval()
    for pieces, counted in held_out_batches(tokens, context, run.evaluate_pieces, size, world.rank, world.size):
        for layer, tally in zip(layers, tallies, strict=True):
            layer.mlp.tally = tally if counted else None
        with world.precision():
            loss = model(pieces.to(world.device)).loss
        sums += torch.tensor([float(loss) * counted, counted], dtype=torch.float64, device=world.device)
    for layer in layers:
        layer.mlp.tally = None
    model.train()
    model.set_activation(before)
    neurons = world.total(torch.stack([tally.neurons for tally in tallies]))
    fullest = world.largest(torch.stack([tally.fullest for tally in tallies]))
    total, pieces_done = world.total(sums).tolist()
    mean = total / pieces_done
    if not math.isfinite(mean):
        raise NumericError(f"the held-out loss after step {step} is {mean}")
    nonzeros = (neurons.sum(1).double() / (pieces_done * context)).tolist()
    return HeldOutReport(
        step=step,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        sparsity=1 - sum(nonzeros) / (len(nonzeros) * inner),
        nonzeros=nonzeros,
        fullest=fullest.tolist(),
        dead=(neurons == 0).double().mean(1).tolist(),
        activation=str(activation),
    )
