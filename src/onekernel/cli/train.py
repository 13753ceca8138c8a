"""Train an activation-sparse model, or go on training one, as a TOML file says.

The folder that run.directory names gets checkpoints, log.jsonl, a picture of loss and sparsity, and at the end the
model as a Hugging Face directory. Ctrl-C writes a checkpoint first. On several GPUs: torchrun --nproc-per-node N -m
onekernel train CONFIG.toml.
"""

from __future__ import annotations

import argparse

from onekernel.cli.console import Console

HELP = "train an activation-sparse model"
USAGE = "CONFIG.toml [--resume]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("config", metavar="CONFIG.toml", help="what to do; docs/training.md has its keys")
    parser.add_argument("--resume", action="store_true", help="go on after the last checkpoint, if there is one")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    import shlex
    from pathlib import Path

    from onekernel.train.settings import read_settings

    settings = read_settings(Path(args.config))
    from onekernel.cli.training import run_training

    again = f"onekernel train {shlex.quote(args.config)} --resume"
    return run_training(settings, console, resume=args.resume, again=again)
