"""What `train` and `sparsify` say while a run goes on, and at its end."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from onekernel.cli.console import Console, is_terminal

if TYPE_CHECKING:
    from onekernel.train.record import HeldOutReport, Report
    from onekernel.train.run import Listener, Outcome
    from onekernel.train.settings import Settings

INTERRUPTED = 130


def run_training(settings: Settings, console: Console, *, resume: bool, again: str) -> int:
    """Train, tell how it goes, and return the exit code; `again` is the command that goes on with the run."""
    from onekernel.train.run import train

    outcome = train(settings, listener(settings, console), resume=resume)
    console.clear_bar()
    if outcome.interrupted:
        console.note(f"interrupted after step {outcome.step}; its checkpoint is written, go on with: {again}")
        return INTERRUPTED
    if _is_first():
        _conclude(outcome, settings, console)
    return 0


def listener(settings: Settings, console: Console) -> Listener:
    """Return who draws a bar with loss, sparsity and tokens/s on a terminal, and writes a line a report elsewhere."""
    from onekernel.train.record import StepReport
    from onekernel.train.run import Listener

    steps = settings.run.steps

    def report(report: Report) -> None:
        if not isinstance(report, StepReport):
            console.note(f"step {report.step}: {_held_out(report)}")
            return
        state = f"loss {report.loss:.3f}, {100 * report.sparsity:.1f} % zeros, {report.tokens_per_s:,.0f} tok/s"
        if is_terminal(sys.stderr):
            console.progress(state, report.step, steps)
        else:
            console.note(f"step {report.step}/{steps}: {state}")

    return Listener(note=console.note, report=report)


def _held_out(report: HeldOutReport) -> str:
    dead = sum(report.dead) / len(report.dead)
    return (
        f"held-out perplexity {report.perplexity:.2f} with {report.activation}, {100 * report.sparsity:.1f} % zeros, "
        f"{100 * dead:.1f} % of neurons dead"
    )


def _conclude(outcome: Outcome, settings: Settings, console: Console) -> None:
    last = outcome.held_out[-1]
    console.data(_held_out(last))
    console.data(f"model: {outcome.model}")
    if silent := [str(layer) for layer, active in enumerate(last.nonzeros) if active == 0]:
        where = "any layer" if len(silent) == len(last.nonzeros) else f"layer {', '.join(silent)}"
        console.note(
            f"warning: no neuron of {where} is active any more, so nothing comes from those feed-forwards. The penalty "
            f"was too much: train again with a smaller l1 than {settings.sparsity.l1:g}, a longer warm-up of it, or "
            "renoise"
        )
    console.note(f'try it: onekernel generate {shlex.quote(str(outcome.model))} -p "..."')


def _is_first() -> bool:
    """Whether this is the process that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"
