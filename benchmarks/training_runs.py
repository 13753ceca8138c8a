"""Two runs from random weights on the same pieces, without and with the L1 penalty: the rows `run` of training.py.

Both take the same number of steps, as many as the dense one does in the time given, by a short run before: so the gap
of their losses is that of the penalty, and the gap of their times that of the sparse route.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_scale import Scale
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


def plan(text: Path, *, cpu: bool, seconds: float, steps: int | None, l1: float | None, png: Path | None) -> Plan:
    """Return the plan for a GPU, or a tiny one for a CPU, which takes 4 steps if it is not told how many."""
    if cpu:
        return Plan(text, "tiny", TINY_MODEL, 280, 16, 4, l1 or 1e-2, seconds=seconds, steps=steps or 4, png=png)
    return Plan(text, "0.13B", GPU_MODEL, 4096, 512, 64, l1 or 2e-4, seconds=seconds, steps=steps, png=png)


@dataclass(slots=True)
class Heard:
    """What a run reported, and what the energy counter said each time."""

    counter: Callable[[], float] | None
    steps: list[StepReport] = field(default_factory=list)
    held_out: list[HeldOutReport] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)

    def hear(self, report: Report) -> None:
        """Keep a report."""
        if isinstance(report, HeldOutReport):
            self.held_out.append(report)
            return
        self.steps.append(report)
        if self.counter is not None:
            self.energy.append(self.counter())

    def mj_per_token(self) -> float | None:
        """Return the energy of a token between the first report and the last, measuring held-out text included."""
        if len(self.energy) < 2:
            return None
        return (self.energy[-1] - self.energy[0]) / (self.steps[-1].tokens - self.steps[0].tokens)


def run_rows(plan: Plan, scale: Scale, counter: Callable[[], float] | None) -> Iterator[dict[str, Any]]:
    """Yield the one row of both runs, and draw their curves if the plan has a picture."""
    steps = plan.steps or steps_for(plan, scale.device)
    dense, ours = (one_run(plan, scale.device, steps, l1, counter) for l1 in (0.0, plan.l1))
    gap = ours["held_out_loss"] - dense["held_out_loss"]
    row = {
        "kind": "run",
        "model": plan.name,
        **plan.model,
        "text": plan.text.name,
        "tokens": plan.batch * plan.context,
        "steps": steps,
        "l1": plan.l1,
        **ours,
        **{f"dense_{name}": value for name, value in dense.items()},
        "speedup": dense["ms"]["median"] / ours["ms"]["median"],
        "loss_gap": gap,
        "relative_error": abs(gap) / dense["held_out_loss"],
    }
    if plan.png is not None:
        draw(row, plan.png)
    yield row


def steps_for(plan: Plan, device: str) -> int:
    """Return how many steps of the dense run fit into the plan's seconds, from the last reports of a short one."""
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(None)
        train(plan.settings(Path(folder), device, plan.calibration_steps, 0.0), Listener(report=heard.hear))
    rate = spread([report.tokens_per_s for report in heard.steps[len(heard.steps) // 2 :]])["median"]
    return max(2, int(plan.seconds * rate / (plan.batch * plan.context)))


def one_run(plan: Plan, device: str, steps: int, l1: float, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Train once and return what both sides of the comparison have."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats(device)
    heard, began = Heard(counter), time.monotonic()
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
