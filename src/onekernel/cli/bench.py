"""Measure prefill and decode with llama-bench's tests.

pp512 is a prompt of 512 tokens up to its first answer token, tg128 is 128 decode steps, pp512+tg128 both together, and
@ d4096 means after 4096 tokens. Token ids are random, the same at every run. GB/s is the weights' bytes that the
decode steps read per second. % of read is the share of a token's time that it takes just to read these weights and the
KV cache, at the rate measured in this run. p50 and p99 are of the times between tokens, as the host sees them. Shipped
configurations need no weights: onekernel bench Llama-3.2-1B --load-format dummy
"""

from __future__ import annotations

import argparse

from onekernel.cli.console import Console
from onekernel.cli.flags import add_model, engine_config, model_name
from onekernel.errors import ConfigError

HELP = "measure prefill and decode"
USAGE = "MODEL [-p N,...] [-n N,...] [-pg N,N] [-d N,...] [-r N] [options]"

FORMATS = ("md", "table", "csv", "json", "jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""

    def counts(*names: str, help: str) -> None:
        parser.add_argument(*names, metavar="N,...", type=_counts, action="append", help=help)

    counts("-p", "--n-prompt", help="prompt tokens (default 512; 0: no such test)")
    counts("-n", "--n-gen", help="decode steps (default 128; 0: no such test)")
    parser.add_argument(
        "-pg", metavar="N,N", type=_pair, action="append", default=[], help="a prompt and decode steps, timed together"
    )
    counts("-d", "--n-depth", help="tokens in the cache before (default 0)")
    parser.add_argument(
        "-r", "--repetitions", metavar="N", type=int, default=5, help="runs of each test that count (default 5)"
    )
    parser.add_argument(
        "--energy", action="store_true", help="also the GPU's millijoules per token (needs nvidia-ml-py)"
    )
    parser.add_argument("--no-warmup", action="store_true", help="leave out the run before those that count")
    parser.add_argument("-o", "--output", choices=FORMATS, default="md", help="format (default md, a table)")
    parser.add_argument("--json", action="store_true", help="the same as -o json")
    add_model(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    if args.repetitions < 1:
        raise ConfigError(f"--repetitions is {args.repetitions}; it must be at least 1")
    if args.json and args.output not in ("md", "json"):
        raise ConfigError(f"--json and --output {args.output} contradict each other; give one")

    from onekernel.measure.workload import plan_workloads

    counts = _joined(args.n_prompt, 512), _joined(args.n_gen, 128), args.pg, _joined(args.n_depth, 0)
    workloads = plan_workloads(*counts)
    model_name(args)
    engine_config(args)  # a usage error in either comes before the imports below

    from onekernel.cli.bench_output import Row, read_rate, writer
    from onekernel.cli.session import open_llm
    from onekernel.device.facts import facts
    from onekernel.device.resolve import resolve_device
    from onekernel.measure.bench import time_workload
    from onekernel.measure.energy import energy_counter

    energy_mj = None
    if args.energy:
        device = resolve_device(args.device).device
        energy_mj = energy_counter(device, facts(device).uuid if device.startswith("cuda") else "")
    write = writer("json" if args.json else args.output, console, energy=args.energy)
    context = max(workload.context for workload in workloads)
    with open_llm(args, console, max_context=context, prefix_cache=False) as llm:
        rows, rate = [], read_rate(llm.loaded.engine.backend.device)
        for number, workload in enumerate(workloads):
            console.progress(workload.name, number, len(workloads))
            result = time_workload(
                llm.loaded.engine, workload, args.repetitions, warm_up=not args.no_warmup, energy_mj=energy_mj
            )
            console.clear_bar()
            rows.append(Row.of(result, llm.loaded, rate))
            write.row(rows[-1])
        write.end(rows)
    return 0


def _joined(lists: list[list[int]] | None, default: int) -> list[int]:
    return [count for part in lists or [[default]] for count in part]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 128,512")
    return counts


def _pair(text: str) -> tuple[int, int]:
    pair = _counts(text)
    if len(pair) != 2 or 0 in pair:
        raise argparse.ArgumentTypeError(f"{text!r} is not a prompt and an answer length such as 512,128")
    return pair[0], pair[1]
