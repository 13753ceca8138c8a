"""Write a model in a form that loads faster and takes less space.

With --ternary: the projections as codes of two bits and their scales, from packed weights in either convention, from
master weights (quantised by their mean absolute value, which only suits a model that was trained so) or from weights
that were expanded. The result is a Hugging Face directory, read by this package and, with one scale a projection and a
dense head, by transformers.
"""

from __future__ import annotations

import argparse

from onekernel.cli.console import Console
from onekernel.errors import ConfigError, ModelError

HELP = "write a model with packed weights"
USAGE = "MODEL DIRECTORY --ternary [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub id")
    parser.add_argument("directory", metavar="DIRECTORY", help="where to write; made if it is not there")
    parser.add_argument("--ternary", action="store_true", help="two bits a weight, for ternary models")
    parser.add_argument(
        "--group", type=int, choices=(64, 128), help="columns that share a scale (default: the model's)"
    )
    parser.add_argument(
        "--head",
        choices=("dense", "int8", "ternary"),
        help="dense: as it is; int8: rows with a scale each; ternary: with the embedding (default: the model's)",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    if not args.ternary:
        raise ConfigError("say what to convert to: --ternary")

    from dataclasses import replace
    from pathlib import Path

    from onekernel.config import Ternary
    from onekernel.engine.memory import format_bytes
    from onekernel.models.registry import model_config
    from onekernel.weights.open import is_hub_id, local_path, open_checkpoint
    from onekernel.weights.ternary.write import write_ternary

    path, destination = local_path(args.model), Path(args.directory)
    if not path.is_dir() and (path.exists() or not is_hub_id(args.model)):
        raise ModelError(
            f"{args.model!r} is neither a directory nor a hub id such as org/name; convert takes only these"
        )
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is a file; give a directory, which is made if it is not there")
    checkpoint = open_checkpoint(args.model, revision=args.revision, progress=console.note)
    try:
        config = model_config(checkpoint.settings.config)
        was = config.ternary or Ternary()
        config = replace(config, ternary=Ternary(args.group or was.group, args.head or was.head))
        before = sum(info.stored_bytes for info in checkpoint.tensors.values())
        write_ternary(
            checkpoint,
            config,
            destination,
            lambda done, total: console.progress("tensors", done, total),
        )
    finally:
        checkpoint.close()
    console.clear_bar()
    written = open_checkpoint(str(destination))
    after = sum(info.stored_bytes for info in written.tensors.values())
    written.close()
    console.note(f"wrote {destination}: {format_bytes(before)} became {format_bytes(after)}")
    if not (destination / "tokenizer.json").exists():
        console.note(
            f"{args.model} has no tokenizer.json: put the model's own into {destination}, or it answers nothing"
        )
    return 0
