"""Two runs from random weights on the same pieces, without and with the L1 penalty: the rows `run` of training.py.

Both take the same number of steps, as many as the dense one does in the time given, by a short run before: so the gap
of their losses is that of the penalty, and the gap of their times that of the sparse route. At once, as two processes
on one GPU, each gets half of it: the losses are the same, times and energy mean nothing and are left out.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger import Job
from benchmarks.training_scale import Scale, allow_versions
from onekernel.measure.results import spread
from onekernel.train.record import HeldOutReport, Report, StepReport
from onekernel.train.run import Listener, train
from onekernel.train.settings import Settings, settings_from


@dataclass(frozen=True, slots=True)
class Plan:
    """What both runs are told. `steps` None: as many as the dense run does in `seconds`."""

    text: Path
    name: str
    model: dict[str, int]
    vocab: int
    context: int
    batch: int
    l1: float
    learning_rate: float = 1e-3
    seconds: float = 240.0
    steps: int | None = None
    calibration_steps: int = 40
    png: Path | None = None
    at_once: bool = False

    def settings(self, folder: Path, device: str, steps: int, l1: float) -> Settings:
        """Return a run's settings; without a penalty its feed-forwards are dense."""
        dimensions = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        run = {
            "directory": str(folder),
            "steps": steps,
            "batch": self.batch,
            "device": device,
            "compile": device.startswith("cuda"),
            "log_every": max(1, steps // 100),
            "evaluate_every": max(1, steps // 10),
            "checkpoint_every": 0,
            "picture": False,
        }
        return settings_from(
            {
                "run": run,
                "data": {"train": [str(self.text)], "held_out_share": 0.1, "context": self.context},
                "tokenizer": {"vocab_size": self.vocab},
                "model": {name: self.model[name] for name in dimensions},
                "optimizer": {"learning_rate": self.learning_rate, "warm_up": min(100, steps // 5)},
                "sparsity": {"l1": l1, "l1_warm_up": steps // 5, "route": "auto" if l1 else "dense"},
            }
        )


GPU_MODEL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "num_attention_heads": 16}
"""0.13 B parameters with 4,096 tokens."""

TINY_MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def plan(
    text: Path,
    *,
    cpu: bool,
    seconds: float,
    steps: int | None,
    l1: float | None,
    png: Path | None,
    at_once: bool = False,
) -> Plan:
    """Return the plan for a GPU, or a tiny one for a CPU, which takes 4 steps if it is not told how many."""
    given: dict[str, Any] = {"seconds": seconds, "png": png, "at_once": at_once}
    if cpu:
        return Plan(text, "tiny", TINY_MODEL, 280, 16, 4, l1 or 1e-2, steps=steps or 4, **given)
    return Plan(text, "0.13B", GPU_MODEL, 4096, 512, 64, l1 or 2e-4, steps=steps, **given)


@dataclass(slots=True)
class Heard:
    """What a run reported, and what the energy counter said each time."""

    counter: Callable[[], float] | None
    name: str = ""
    steps: list[StepReport] = field(default_factory=list)
    held_out: list[HeldOutReport] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    def hear(self, report: Report) -> None:
        """Keep a report; a named run also says how it does on held-out text."""
        if isinstance(report, HeldOutReport):
            self.held_out.append(report)
            if self.name:
                print(f"{self.name}, step {report.step}: {report.loss:.3f}, {report.sparsity:.1%} zeros", flush=True)
            return
        self.steps.append(report)
        if self.counter is not None:
            self.energy.append(self.counter())

    def mj_per_token(self) -> float | None:
        """Return the energy of a token between the first report and the last, measuring held-out text included."""
        if len(self.energy) < 2:
            return None
        return (self.energy[-1] - self.energy[0]) / (self.steps[-1].tokens - self.steps[0].tokens)


def run_jobs(plan: Plan, scale: Scale, counter: Callable[[], float] | None) -> Iterator[Job]:
    """Yield the one measurement, of both runs."""
    yield "two trainings", partial(run_row, plan, scale, counter)


def run_row(plan: Plan, scale: Scale, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Return the row of both runs, and draw their curves if the plan has a picture."""
    steps = plan.steps or steps_for(plan, scale.device)
    print(f"two runs of {steps} steps", flush=True)
    if scale.device.startswith("cuda"):
        torch.cuda.empty_cache()  # what the short run took is for the others now
    dense, ours = both_at_once(plan, scale, steps) if plan.at_once else one_by_one(plan, scale, steps, counter)
    gap = ours["held_out_loss"] - dense["held_out_loss"]
    row = {
        "kind": "run",
        "model": plan.name,
        **plan.model,
        "text": plan.text.name,
        "tokens": plan.batch * plan.context,
        "steps": steps,
        "l1": plan.l1,
        "at_once": plan.at_once,
        **ours,
        **{f"dense_{name}": value for name, value in dense.items()},
        "speedup": None if plan.at_once else dense["ms"]["median"] / ours["ms"]["median"],
        "loss_gap": gap,
        "relative_error": abs(gap) / dense["held_out_loss"],
    }
    if plan.png is not None:
        try:
            draw(row, plan.png)
        except ImportError as error:  # the row has the curves; a picture can be made of them anywhere
            print(f"no picture: {error}", flush=True)
    return row


def one_by_one(
    plan: Plan, scale: Scale, steps: int, counter: Callable[[], float] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both runs, the dense one first."""
    return one_run(plan, scale.device, steps, 0.0, counter), one_run(plan, scale.device, steps, plan.l1, counter)


def both_at_once(plan: Plan, scale: Scale, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both runs, each in a process of its own, without what only a run that has the device alone can tell."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        dense = pool.submit(one_run, plan, scale.device, steps, 0.0, None)
        ours = pool.submit(one_run, plan, scale.device, steps, plan.l1, None)
        untimed = {"ms": None, "tokens_per_s": None}
        return dense.result() | untimed, ours.result() | untimed


def steps_for(plan: Plan, device: str) -> int:
    """Return how many steps of the dense run fit into the plan's seconds, from the last reports of a short one."""
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(None)
        train(plan.settings(Path(folder), device, plan.calibration_steps, 0.0), Listener(report=heard.hear))
    rate = spread([report.tokens_per_s for report in heard.steps[len(heard.steps) // 2 :]])["median"]
    share = 0.5 if plan.at_once else 1.0
    return max(2, int(share * plan.seconds * rate / (plan.batch * plan.context)))


def one_run(plan: Plan, device: str, steps: int, l1: float, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Train once and return what both sides of the comparison have."""
    on_gpu = device.startswith("cuda")
    allow_versions(device)
    if on_gpu:
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats(device)
    heard, began = Heard(counter, f"L1 {l1:g}" if l1 else "dense"), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        train(plan.settings(Path(folder), device, steps, l1), Listener(report=heard.hear))
    step_tokens, last = plan.batch * plan.context, heard.held_out[-1]
    rates = [report.tokens_per_s for report in heard.steps[1:] or heard.steps]  # the first compiles
    return {
        "seconds": time.monotonic() - began,
        "ms": spread([1e3 * step_tokens / rate for rate in rates]),
        "tokens_per_s": spread(rates),
        "peak_mb": torch.cuda.max_memory_allocated(device) / 1e6 if on_gpu else None,
        "mj_per_token": heard.mj_per_token(),
        "train_loss": heard.steps[-1].loss,
        "held_out_loss": last.loss,
        "nonzero_fraction": 1 - last.sparsity,
        "sparsity": last.sparsity,
        "sparse_layers": heard.steps[-1].routes.count("sparse"),
        "train_curve": [[report.tokens, report.loss, report.sparsity] for report in heard.steps],
        "held_out_curve": [[report.step * step_tokens, report.loss, report.sparsity] for report in heard.held_out],
    }


def draw(row: dict[str, Any], path: Path) -> None:
    """Draw the losses of both runs, and the share of zeros beside them, as a PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, zeros = figure.subplots(1, 2)
    for side, label, colour in (("dense_", "dense", "C0"), ("", f"L1 {row['l1']:g}", "C1")):
        for curve, style, name in (("train_curve", "-", "training"), ("held_out_curve", "o--", "held out")):
            tokens, loss, sparsity = zip(*row[side + curve], strict=True)
            marks = {"color": colour, "label": f"{label}, {name}", "markersize": 4, "linewidth": 1}
            losses.plot([1e-6 * count for count in tokens], loss, style, **marks)
            zeros.plot([1e-6 * count for count in tokens], [100 * share for share in sparsity], style, **marks)
    losses.set_ylabel("loss, nats a token")
    zeros.set_ylabel("zeros, %")
    losses.set_title(f"{row['model']}, {row['steps']:,} steps: held-out gap {row['loss_gap']:+.3f}")
    for axes in (losses, zeros):
        axes.set_xlabel("million tokens")
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
