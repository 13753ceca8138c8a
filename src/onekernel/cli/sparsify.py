"""Make a model's feed-forwards sparse: put ReLU in the place of its activation, and train on with an L1 penalty.

Perplexity on the held-out end of the text is printed for the model as it was, with ReLU before and after training, and
the result is a Hugging Face directory. `onekernel train` has more to set, under model.start.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from onekernel.cli.console import Console
from onekernel.errors import OnekernelError

if TYPE_CHECKING:
    from onekernel.train.settings import Settings

HELP = "turn a SiLU model into a sparse ReLU one"
USAGE = "MODEL DIRECTORY --text FILE [options]"

_FLAGS = {
    "run.directory": "DIRECTORY",
    "run.steps": "--steps",
    "run.batch": "--batch",
    "run.micro_batch": "--micro-batch",
    "run.seed": "--seed",
    "run.device": "--device",
    "run.evaluate_pieces": "--held-out-pieces",
    "run.checkpoint_every": "--checkpoint-every",
    "data.train": "--text",
    "data.column": "--column",
    "data.context": "--context",
    "model.start": "MODEL",
    "model.hidden_act": "--activation",
    "optimizer.learning_rate": "--learning-rate",
    "optimizer.warm_up": "--warm-up",
    "sparsity.l1": "--l1",
    "sparsity.l1_warm_up": "--l1-warm-up",
    "sparsity.renoise": "--renoise",
}
"""Key of a run's settings -> the flag that sets it, for messages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""

    def number(name: str, kind: type, default: float, help: str) -> None:
        parser.add_argument(name, metavar="N", type=kind, default=default, help=f"{help} (default {default:g})")

    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory, GGUF file or hub id")
    parser.add_argument("directory", metavar="DIRECTORY", help="folder of the run; the model comes to DIRECTORY/model")
    parser.add_argument(
        "--text", metavar="FILE", required=True, action="append", help="text, parquet, or a folder; may be repeated"
    )
    parser.add_argument("--column", metavar="NAME", default="text", help="of parquet files (default text)")
    number("--steps", int, 2000, "optimiser steps")
    number("--l1", float, 1e-4, "coefficient of the penalty")
    number("--l1-warm-up", int, 200, "steps over which the coefficient rises")
    number("--renoise", float, 0.0, "share by which gates of dead neurons move towards noise after each step")
    number("--learning-rate", float, 1e-4, "highest rate of AdamW")
    number("--warm-up", int, 100, "steps over which the rate rises")
    number("--context", int, 1024, "tokens of a piece")
    number("--batch", int, 32, "pieces of a step, over all processes")
    parser.add_argument("--micro-batch", metavar="N", type=int, help="pieces at once (default: all of a process)")
    number("--checkpoint-every", int, 500, "steps between checkpoints; 0: only when interrupted")
    number("--held-out-pieces", int, 64, "pieces to measure perplexity on, at most")
    number("--seed", int, 0, "of the order of the pieces")
    parser.add_argument("--activation", choices=("relu", "relu2"), default="relu", help="what takes SiLU's place")
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint, if there is one")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    import shlex
    import sys

    from onekernel.cli.training import run_training

    words = [word for word in sys.argv[1:] if word != "--resume"]
    try:
        again = f"onekernel {shlex.join(words)} --resume"
        return run_training(_settings(args), console, resume=args.resume, again=again)
    except OnekernelError as error:
        error.args = (in_flags(str(error)),)
        raise


def in_flags(message: str) -> str:
    """Return a message about a run's settings in the words of this command."""
    return re.sub(r"\b[a-z]+\.\w+", lambda key: _FLAGS.get(key[0], key[0]), message)


def _settings(args: argparse.Namespace) -> Settings:
    from onekernel.train.settings import settings_from

    return settings_from(
        {
            "run": {
                "directory": args.directory,
                "steps": args.steps,
                "batch": args.batch,
                "micro_batch": args.micro_batch,
                "seed": args.seed,
                "device": args.device,
                "evaluate_pieces": args.held_out_pieces,
                "checkpoint_every": args.checkpoint_every,
            },
            "data": {"train": args.text, "column": args.column, "context": args.context},
            "model": {"start": args.model, "hidden_act": args.activation},
            "optimizer": {"learning_rate": args.learning_rate, "warm_up": args.warm_up},
            "sparsity": {"l1": args.l1, "l1_warm_up": args.l1_warm_up, "renoise": args.renoise},
        }
    )
