"""Loss and sparsity on the held-out text, the same whatever the number of processes."""

from __future__ import annotations

import math

import torch

from onekernel.errors import NumericError
from onekernel.ops.sparse_training import SparsityStats
from onekernel.train.corpus import TokenFile
from onekernel.train.model import Activation, Losses, SparseLlama
from onekernel.train.pieces import held_out_batches
from onekernel.train.record import HeldOutReport
from onekernel.train.routes import shared
from onekernel.train.settings import Settings
from onekernel.train.world import World


@torch.no_grad()
def evaluate(
    model: SparseLlama, tokens: TokenFile, settings: Settings, world: World, *, step: int, activation: Activation
) -> HeldOutReport:
    """Return the model's report over the first `evaluate_pieces` pieces that do not overlap; each token counts once.

    Every process must call it. Raises NumericError if the loss is not finite.
    """
    context, run = settings.data.context, settings.run
    size = run.micro_batch or run.batch // world.size
    layers, inner = model.layers, model.config.intermediate_size
    stats = SparsityStats(len(layers), inner, world.device)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    before = layers[0].mlp.activation
    model.set_activation(activation)
    model.count_neurons(True)
    model.eval()
    for pieces, counted in held_out_batches(tokens, context, run.evaluate_pieces, size, world.rank, world.size):
        with world.precision():
            losses: Losses = model(pieces.to(world.device))
        if counted:
            losses.add_to(stats)
            sums += torch.tensor([float(losses.loss) * counted, counted], dtype=torch.float64, device=world.device)
    model.train()
    model.set_activation(before)
    seen = shared(stats.read(), world)
    total, pieces_done = world.total(sums).tolist()
    mean = total / pieces_done
    if not math.isfinite(mean):
        raise NumericError(f"the held-out loss after step {step} is {mean}")
    return HeldOutReport(
        step=step,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        sparsity=1 - seen.nonzero_fraction,
        nonzeros=[layer.mean for layer in seen.layers],
        fullest=[layer.fullest for layer in seen.layers],
        dead=[layer.dead / inner for layer in seen.layers],
        activation=activation,
    )
