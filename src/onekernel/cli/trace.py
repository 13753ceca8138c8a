"""Write down where the microseconds of one token go: on every SM, phase by phase, with the bytes on their way.

The trace opens in ui.perfetto.dev or chrome://tracing. It comes from a build of the kernel with hooks, which cost the
token a few per cent; other builds have none. Needs a GPU on which the model runs in one kernel.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onekernel.cli.console import Console
from onekernel.cli.flags import add_model, engine_config, model_name
from onekernel.errors import ConfigError

if TYPE_CHECKING:
    from onekernel.measure.timeline import KindTimes, Timeline

HELP = "where the microseconds of a token go"
USAGE = "MODEL [-p N] [-n N] [-o FILE.json] [--png FILE.png] [--summary] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("-p", "--n-prompt", metavar="N", type=int, default=64, help="random prompt tokens (default 64)")
    parser.add_argument("-n", "--token", metavar="N", type=int, default=8, help="answer token to trace (default 8)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the trace (default trace.json unless --png or --summary)"
    )
    parser.add_argument("--png", metavar="FILE", help="a picture; needs matplotlib")
    parser.add_argument("--until-us", metavar="X", type=float, help="draw only the first X us of the token")
    parser.add_argument("--summary", action="store_true", help="print a table on stdout")
    add_model(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    if args.n_prompt < 1 or args.token < 0:
        raise ConfigError(
            f"--n-prompt is {args.n_prompt} and --token {args.token}; give at least one prompt token and a token from 0"
        )
    if args.until_us is not None and not args.until_us > 0:
        raise ConfigError(f"--until-us is {args.until_us}; it must be above 0")
    model_name(args)
    options = engine_config(args)  # a usage error in either comes before the imports below

    from onekernel.device.resolve import resolve_device

    device = resolve_device(options.device)
    if not device.device.startswith("cuda"):
        raise ConfigError(f"a trace is of the kernel on a GPU, and the device is {device.device} ({device.reason})")

    from onekernel.cli.session import open_llm
    from onekernel.engine.megakernel_backend import MegakernelBackend
    from onekernel.measure.bench import random_ids
    from onekernel.measure.timeline import summarize
    from onekernel.measure.trace import trace_token
    from onekernel.measure.trace_files import write_chrome, write_picture

    output = args.output or (None if args.png or args.summary else "trace.json")
    with open_llm(args, console, max_context=args.n_prompt + args.token + 2) as llm:
        backend = llm.loaded.engine.backend
        if not isinstance(backend, MegakernelBackend):
            raise ConfigError(
                f"this model runs on the backend {backend.name} on {backend.device}, which has no kernel to trace; "
                "`--backend megakernel` says what is missing"
            )
        prompt = random_ids(args.n_prompt, int(backend.megakernel.plan.header["vocab_limit"]))
        timeline = trace_token(backend, prompt, args.token)
    if output:
        write_chrome(timeline, Path(output))
        console.note(f"wrote {output}: open it in ui.perfetto.dev")
    if args.png:
        title = f"{args.model}: one token at position {args.n_prompt + args.token}, {timeline.token_us:.0f} us"
        write_picture(timeline, Path(args.png), title, until_us=args.until_us)
        console.note(f"wrote {args.png}")
    if args.summary:
        for line in table(timeline, summarize(timeline)):
            print(line)
    return 0


def table(timeline: Timeline, rows: list[KindTimes]) -> list[str]:
    """Return the lines of the summary: microseconds of a token by kind of phase; the parts are means over SMs."""
    head = ("phase", "count", "MB", "us", "each", "values", "weights", "work", "meet", "publish")
    lines = ["{:<10} {:>5} {:>8} {:>8} {:>7} {:>8} {:>8} {:>8} {:>8} {:>8}".format(*head)]
    for row in rows:
        parts = (row.values_us, row.weights_us, row.work_us, row.meet_us, row.publish_us)
        lines.append(
            f"{row.kind:<10} {row.phases:>5} {row.megabytes:>8.1f} {row.total_us:>8.1f} "
            f"{row.total_us / row.phases:>7.2f} " + " ".join(f"{part:>8.1f}" for part in parts)
        )
    lines.append(f"{'token':<10} {'':>5} {sum(row.megabytes for row in rows):>8.1f} {timeline.token_us:>8.1f}")
    if timeline.active_neurons is not None:
        lines.append("neurons that fired, by layer: " + " ".join(f"{n:.0f}" for n in timeline.active_neurons))
    return lines
