"""What a run writes down: a line of JSON for each report, TensorBoard if asked for, and a picture of both curves."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onekernel.errors import ConfigError, TrainingError
from onekernel.train.settings import RunSettings
from onekernel.weights.directory import RUN_LOG

LOG, PICTURE, EVENTS = RUN_LOG, "progress.png", "tensorboard"


@dataclass(frozen=True, slots=True)
class StepReport:
    """Means over the steps since the last report; `step` counts those done."""

    step: int
    loss: float
    penalty: float
    l1: float
    """The coefficient that the penalty was multiplied with in the last of these steps."""
    sparsity: float
    """Share of neurons that were not active, over all layers."""
    nonzeros: list[float]
    """Active neurons of a token, by layer."""
    fullest: list[int]
    """Most active neurons of a token, by layer."""
    dead: list[float]
    """Share of neurons that no token of the last step activated, by layer; none if it was interrupted uncounted."""
    routes: list[str]
    """How each layer was computed, dense or sparse."""
    learning_rate: float
    gradient_norm: float
    tokens: int
    """Since the beginning of the run."""
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """What the held-out text says about the model after `step` steps."""

    step: int
    loss: float
    perplexity: float
    sparsity: float
    nonzeros: list[float]
    fullest: list[int]
    """Most active neurons of a token, by layer."""
    dead: list[float]
    """Share of neurons that no token activated, by layer."""
    activation: str


Report = StepReport | HeldOutReport


class Record:
    """Writes reports into a run's folder."""

    def __init__(self, folder: Path, settings: RunSettings, step: int) -> None:
        """Begin after `step`: what was reported beyond it belongs to a part of the run that is done again.

        Raises ConfigError if TensorBoard or a picture is asked for and its package is not installed.
        """
        self._log, self._picture = folder / LOG, _wants_picture(settings)
        self._folder = folder
        self._board = _board(folder / EVENTS, step) if settings.tensorboard else None
        kept = [line for line in read_log(self._log) if line["step"] <= step] if step else []
        self._log.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, report: Report) -> None:
        """Append a report; raises TrainingError if the disk is full."""
        kind = "step" if isinstance(report, StepReport) else "held_out"
        line = {"kind": kind, **asdict(report)}
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainingError(f"{self._log} cannot be written ({error.strerror}); make room, then resume") from error
        if self._board is not None:
            for name, value in line.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, report.step)

    def end(self) -> None:
        """Draw the picture and close the files."""
        if self._board is not None:
            self._board.close()
        if self._picture:
            draw(read_log(self._log), self._folder / PICTURE)


def read_log(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a run's log; one that a kill cut off is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw loss and sparsity over steps as a PNG; needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for kind, label, style in (("step", "training", "-"), ("held_out", "held out", "o")):
        chosen: list[Mapping[str, Any]] = [line for line in lines if line["kind"] == kind]
        steps = [line["step"] for line in chosen]
        upper.plot(steps, [line["loss"] for line in chosen], style, label=label, markersize=4)
        lower.plot(steps, [100 * line["sparsity"] for line in chosen], style, label=label, markersize=4)
    upper.set_ylabel("loss, nats a token")
    upper.legend()
    lower.set_ylabel("zeros, %")
    lower.set_xlabel("step")
    figure.savefig(path, dpi=120)


def _wants_picture(settings: RunSettings) -> bool:
    there = importlib.util.find_spec("matplotlib") is not None
    if settings.picture and not there:
        raise ConfigError("run.picture needs matplotlib: pip install matplotlib")
    return there if settings.picture is None else settings.picture


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("run.tensorboard needs tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(folder), purge_step=step + 1)
