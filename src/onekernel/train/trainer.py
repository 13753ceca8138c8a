"""The loop over optimiser steps. Between reports nothing waits for the device."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onekernel.errors import NumericError
from onekernel.ops.sparse_training import SparsityStats
from onekernel.train.interrupt import Interrupt
from onekernel.train.model import Losses, SparseLlama
from onekernel.train.pieces import Pieces
from onekernel.train.record import StepReport
from onekernel.train.renoise import renoise
from onekernel.train.routes import choose_routes, shared
from onekernel.train.schedule import l1_coefficient, learning_rate
from onekernel.train.settings import Settings
from onekernel.train.world import World


class Duties(Protocol):
    """What a run does now and then between steps; every process calls each at the same step."""

    def report(self, report: StepReport) -> None:
        """Take the means since the last report."""

    def evaluate(self, step: int) -> None:
        """Measure on the held-out text."""

    def save(self, step: int) -> None:
        """Write a checkpoint."""


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW over the parameters; matrices decay, norms and biases do not."""
    given = settings.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": given.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=given.learning_rate, betas=(given.beta1, given.beta2), eps=given.eps)


class Trainer:
    """Takes the model from one step to another."""

    def __init__(
        self, model: SparseLlama, shared: nn.Module, optimizer: torch.optim.AdamW, settings: Settings, world: World
    ) -> None:
        self._model, self._shared, self._optimizer = model, shared, optimizer
        self._settings, self._world = settings, world
        self._sums = self._zeros()
        self._stats = SparsityStats(len(model.layers), model.config.intermediate_size, world.device)

    def run(self, pieces: Pieces, begin: int, duties: Duties, interrupt: Interrupt) -> int:
        """Train from `begin` steps to `run.steps`, or until interrupted; return the steps done.

        Raises NumericError, before a checkpoint is written, if the loss or the gradient is not finite.
        """
        run = self._settings.run
        since, started = begin, time.monotonic()
        for step in range(begin, run.steps):
            done = step + 1
            saves = done == run.steps or (run.checkpoint_every > 0 and done % run.checkpoint_every == 0)
            looks = done % run.log_every == 0 or saves
            # Compiled code is one for all steps, and dead neurons are looked for in each.
            self._model.count_neurons(looks or run.compile or self._settings.sparsity.renoise > 0)
            self._step(step, pieces, looks=looks)
            stops = interrupt.asked if self._world.size == 1 else looks and self._anyone(interrupt.asked)
            if looks or stops:
                duties.report(self._report(done, done - since, time.monotonic() - started, counted=looks))
                since, started = done, time.monotonic()
            if run.evaluate_every and done % run.evaluate_every == 0 and done < run.steps:
                duties.evaluate(done)
                started = time.monotonic()
            if saves or stops:
                duties.save(done)
                started = time.monotonic()
            if stops:
                return done
        return run.steps

    def _step(self, step: int, pieces: Pieces, *, looks: bool) -> None:
        """Take one step; where it `looks`, what was active is counted by neuron too."""
        settings, world = self._settings, self._world
        rate = learning_rate(step, settings.run.steps, settings.optimizer)
        l1 = l1_coefficient(step, settings.sparsity)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        active: Tensor | None = None
        parts = pieces.batch(step, world.rank, world.size).split(settings.run.micro_batch or settings.run.batch)
        for number, part in enumerate(parts):
            with self._accumulation(last=number == len(parts) - 1), world.precision():
                losses: Losses = self._shared(part.to(world.device, non_blocking=True))
                ((losses.loss + l1 * losses.penalty) / len(parts)).backward()
            self._sums[:2] += torch.stack([losses.loss, losses.penalty]).detach() / len(parts)
            losses.add_to(self._stats, by_neuron=looks)
            if settings.sparsity.renoise:
                counts = torch.stack([layer for layer in losses.neuron_counts if layer is not None])
                active = counts if active is None else active + counts
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), settings.optimizer.clip)
        self._sums[2] += norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if active is not None:
            renoise(self._model, world.total(active).unbind(), settings.sparsity.renoise, settings.run.seed, step)

    def _accumulation(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients go to the other processes with the last one only."""
        if self._world.size == 1:
            return contextlib.nullcontext()
        set_sync = getattr(self._shared, "set_requires_gradient_sync", None)
        if set_sync is not None:  # FSDP2
            set_sync(last)
            return contextlib.nullcontext()
        no_sync: Any = self._shared.no_sync  # DDP's
        return contextlib.nullcontext() if last else no_sync()

    def _report(self, done: int, steps: int, seconds: float, *, counted: bool) -> StepReport:
        """Return the means of the last steps, and choose the ways of the next if neurons were counted."""
        settings = self._settings
        means = self._world.mean(self._sums / steps).tolist()
        seen = shared(self._stats.read(), self._world)
        self._sums = self._zeros()
        loss, penalty, norm = means
        if not math.isfinite(sum(means)):
            what, value = ("loss", loss) if not math.isfinite(loss) else ("norm of the gradient", norm)
            raise NumericError(
                f"the {what} became {value} between steps {done - steps} and {done}; lower optimizer.learning_rate "
                "or raise optimizer.warm_up"
            )
        routes: list[str] = [layer.mlp.route.name for layer in self._model.layers]
        inner = self._model.config.intermediate_size
        if counted:
            choose_routes(self._model, seen, settings, self._world)
        step_tokens = settings.run.batch * settings.data.context
        return StepReport(
            step=done,
            loss=loss,
            penalty=penalty,
            l1=l1_coefficient(done - 1, settings.sparsity),
            sparsity=1 - seen.nonzero_fraction,
            nonzeros=[layer.mean for layer in seen.layers],
            fullest=[layer.fullest for layer in seen.layers],
            dead=[layer.dead / inner for layer in seen.layers if counted],
            routes=routes,
            learning_rate=learning_rate(done - 1, settings.run.steps, settings.optimizer),
            gradient_norm=norm,
            tokens=done * step_tokens,
            tokens_per_s=steps * step_tokens / max(seconds, 1e-9),
        )

    def _anyone(self, asked: bool) -> bool:
        """Whether any process was interrupted; all must stop after the same step."""
        return bool(self._world.largest(torch.tensor(float(asked), device=self._world.device)))

    def _zeros(self) -> Tensor:
        """Return sums of loss, penalty and gradient norm."""
        return torch.zeros(3, device=self._world.device)
