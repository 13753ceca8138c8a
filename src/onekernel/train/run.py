"""One run from its settings to a model on disk: `train`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn, optim

from onekernel.errors import ConfigError, NumericError, TrainingError
from onekernel.text.vocab import Vocab
from onekernel.train.checkpoint import Progress, load_checkpoint, read_progress, save_checkpoint
from onekernel.train.corpus import Corpus, has_corpus, open_corpus, write_corpus
from onekernel.train.evaluate import evaluate
from onekernel.train.export import export
from onekernel.train.interrupt import Interrupt
from onekernel.train.model import Activation, SparseLlama
from onekernel.train.pieces import Pieces
from onekernel.train.record import HeldOutReport, Record, Report, StepReport
from onekernel.train.routes import first_routes
from onekernel.train.settings import Settings
from onekernel.train.start import build_model, find_start
from onekernel.train.trainer import Trainer, adamw
from onekernel.train.vocabulary import rows
from onekernel.train.world import World, open_world
from onekernel.weights.directory import RUN_CHECKPOINT, RUN_MODEL, WEIGHTS

CHECKPOINT, MODEL, TOKENIZER, TOKENS = RUN_CHECKPOINT, RUN_MODEL, "tokenizer", "tokens"


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears of a run while it goes on; only the first process speaks."""

    note: Callable[[str], None] = lambda text: None
    report: Callable[[Report], None] = lambda report: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    step: int
    interrupted: bool
    model: Path
    """The exported model; it is only there if the run was not interrupted."""
    held_out: list[HeldOutReport] = field(default_factory=list)
    """What was measured in this call, in order."""


def train(settings: Settings, listener: Listener | None = None, *, resume: bool = False) -> Outcome:
    """Train, measure, and write the model into `run.directory`; under torchrun together with the other processes.

    `resume` goes on after the last checkpoint if there is one, with the same losses as if nothing had happened. Ctrl-C
    and SIGTERM write a checkpoint and end it early. Raises ConfigError for settings that contradict each other or the
    run in the folder, TrainingError for damaged text, a checkpoint of another shape or a full disk, NumericError if the
    loss is not finite; the last checkpoint is whole then.
    """
    with open_world(settings.run) as world:
        heard = (listener or Listener()) if world.first else Listener()
        run = _Run(settings, world, heard)
        try:
            return run.go(resume)
        except NumericError as error:
            there = run.checkpoint.is_file()
            advice = f"step {read_progress(run.checkpoint).step} is whole in {run.checkpoint}" if there else "none yet"
            raise NumericError(f"{error}. Last checkpoint: {advice}") from None


class _Run:
    """The parts of one run, and what is done between steps (`trainer.Duties`)."""

    model: SparseLlama
    optimizer: optim.AdamW
    corpus: Corpus
    record: Record

    def __init__(self, settings: Settings, world: World, listener: Listener) -> None:
        self.settings, self.world, self.listener = settings, world, listener
        self.folder = Path(settings.run.directory).expanduser()
        self.checkpoint = self.folder / CHECKPOINT
        self.held_out: list[HeldOutReport] = []

    def go(self, resume: bool) -> Outcome:
        settings, world = self.settings, self.world
        begin = self._claim(resume)
        vocab, shared, activation = self._prepare(begin)
        first_routes(self.model, settings, world, self.listener.note)
        if begin:
            load_checkpoint(self.checkpoint, self.model, self.optimizer)
            self.listener.note(f"going on after step {begin} of {settings.run.steps}")
        if world.first:
            self.record = Record(self.folder, settings.run, begin)
        if activation != self.model.config.hidden_act and not begin:
            self.evaluate(0, activation)
        if settings.model.start is not None and not begin:
            self.evaluate(0)
        pieces = Pieces(self.corpus.train, settings.data.context, settings.run.batch, settings.run.seed)
        trainer = Trainer(self.model, shared, self.optimizer, settings, world)
        with Interrupt(patient=world.size > 1) as interrupt:
            done = trainer.run(pieces, begin, self, interrupt)
            interrupted = interrupt.asked and done < settings.run.steps
        if not interrupted:
            self.evaluate(done)
            export(self.folder / MODEL, self.model, self.model.config, vocab, write=world.first)
        if world.first:
            self.record.end()
        world.barrier()
        return Outcome(done, interrupted, self.folder / MODEL, self.held_out)

    def report(self, report: StepReport) -> None:
        """Write and tell the means since the last report."""
        self._tell(report)

    def evaluate(self, step: int, activation: Activation | None = None) -> None:
        """Measure on the held-out text."""
        found = evaluate(
            self.model,
            self.corpus.held_out,
            self.settings,
            self.world,
            step=step,
            activation=activation or self.model.config.hidden_act,
        )
        self.held_out.append(found)
        self._tell(found)

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        tokens = step * self.settings.run.batch * self.settings.data.context
        progress = Progress(step, tokens, self.settings.fixed())
        save_checkpoint(self.checkpoint, self.model, self.optimizer, progress, write=self.world.first)

    def _tell(self, report: Report) -> None:
        if self.world.first:
            self.record.add(report)
            self.listener.report(report)

    def _claim(self, resume: bool) -> int:
        """Make the folder this run's; return the steps that are done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.directory {self.folder} cannot be made: {error.strerror or error}") from None
        for name in (MODEL, TOKENIZER, TOKENS):
            if (path := self.folder / name).exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file and must become a folder; move it, or give another run.directory")
        if not self.checkpoint.is_file():
            return 0
        progress = read_progress(self.checkpoint)
        if not resume:
            raise ConfigError(
                f"{self.folder} holds a run of {progress.step} steps; go on with it by --resume, or give another "
                "run.directory"
            )
        unwritten = not (self.folder / MODEL / WEIGHTS).is_file()  # as after a full disk: that part is done again
        if progress.step >= self.settings.run.steps + unwritten:
            raise ConfigError(f"the run in {self.folder} has done its {progress.step} steps; raise run.steps to go on")
        _refuse_changes(self.folder, progress.fixed, json.loads(json.dumps(self.settings.fixed())))
        return progress.step

    def _prepare(self, begin: int) -> tuple[Vocab, nn.Module, Activation]:
        """Fill model, optimizer and corpus; the first process makes the files that the others read.

        Those of a run that goes on are kept, those of one that never wrote a checkpoint may be of another text.
        """
        settings, world, tokens = self.settings, self.world, self.folder / TOKENS
        if not world.first:
            world.barrier()
        elif not begin:
            shutil.rmtree(self.folder / TOKENIZER, ignore_errors=True)
        start = find_start(settings, self.folder / TOKENIZER, self.listener.note)
        if world.first:
            if not (begin and has_corpus(tokens)):
                write_corpus(tokens, settings.data, start.vocab, self.listener.note)
            world.barrier()
        self.corpus = open_corpus(tokens)
        if rows(start.vocab) > start.config.vocab_size:
            _check_ids(self.corpus, start.config.vocab_size)
        self.model = build_model(start, settings, world.device)
        self.listener.note(f"{start.config.parameters:,} parameters on {world.size} x {world.device.type}")
        shared = world.shared(self.model, settings.run)
        self.optimizer = adamw(self.model, settings)
        return start.vocab, shared, start.activation


def _refuse_changes(folder: Path, was: dict[str, dict[str, object]], now: dict[str, dict[str, object]]) -> None:
    for section, values in now.items():
        for key, value in values.items():
            if (before := was.get(section, {}).get(key)) != value:
                raise TrainingError(
                    f"{section}.{key} is {value!r} and the run in {folder} has {before!r}; with another it would be "
                    "another run: set it back, or give another run.directory"
                )


def _check_ids(corpus: Corpus, vocab_size: int) -> None:
    for tokens in (corpus.train, corpus.held_out):
        if len(tokens) and (largest := int(tokens.max())) >= vocab_size:
            raise TrainingError(
                f"the text has token id {largest} and the model {vocab_size} rows: the tokenizer is of another model"
            )
