"""Make a model's feed-forwards sparse: put ReLU in the place of its activation, and train on with an L1 penalty.

Perplexity on the held-out end of the text is printed for the model as it was, with ReLU before and after training, and
the result is a Hugging Face directory. `onekernel train` has more to set, under model.start.
"""

from __future__ import annotations

import argparse

from onekernel.cli.console import Console

HELP = "turn a SiLU model into a sparse ReLU one"
USAGE = "MODEL DIRECTORY --text FILE [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""

    def number(name: str, kind: type, default: float, help: str) -> None:
        parser.add_argument(name, metavar="N", type=kind, default=default, help=f"{help} (default {default:g})")

    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory, GGUF file or hub id")
    parser.add_argument("directory", metavar="DIRECTORY", help="folder of the run; the model comes to DIRECTORY/model")
    parser.add_argument(
        "--text", metavar="FILE", required=True, action="append", help="text, parquet, or a folder; may be repeated"
    )
    number("--steps", int, 2000, "optimiser steps")
    number("--l1", float, 1e-4, "coefficient of the penalty")
    number("--l1-warm-up", int, 200, "steps over which the coefficient rises")
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

    from onekernel.train.settings import settings_from

    settings = settings_from(
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
            "data": {"train": args.text, "context": args.context},
            "model": {"start": args.model, "hidden_act": args.activation},
            "optimizer": {"learning_rate": args.learning_rate, "warm_up": args.warm_up},
            "sparsity": {"l1": args.l1, "l1_warm_up": args.l1_warm_up},
        }
    )
    from onekernel.cli.training import run_training

    words = [word for word in sys.argv[1:] if word != "--resume"]
    return run_training(settings, console, resume=args.resume, again=f"onekernel {shlex.join(words)} --resume")
