"""Learning rate and L1 coefficient as functions of the step alone, so that a resumed run goes on as if nothing was."""

from __future__ import annotations

import math

from onekernel.train.settings import OptimizerSettings, SparsitySettings


def learning_rate(step: int, steps: int, settings: OptimizerSettings) -> float:
    """Return the rate of step 0, 1, ... of `steps`: a linear rise, then the decay to `final_share` at the end."""
    if step < settings.warm_up:
        return settings.learning_rate * (step + 1) / settings.warm_up
    if settings.decay == "constant":
        return settings.learning_rate
    done = min((step - settings.warm_up) / max(steps - settings.warm_up, 1), 1.0)
    left = 1 - done if settings.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * left)


def l1_coefficient(step: int, settings: SparsitySettings) -> float:
    """Return the coefficient of step 0, 1, ...: a linear rise over `l1_warm_up` steps, then `l1`."""
    if step < settings.l1_warm_up:
        return settings.l1 * (step + 1) / settings.l1_warm_up
    return settings.l1
