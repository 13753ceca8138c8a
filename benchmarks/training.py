"""Training of sparse feed-forwards beside dense ones, eager and compiled.

    python benchmarks/training.py                               all of it on one GPU: writes results/training.json
    python benchmarks/training.py --kinds ffn_step              one kind of rows
    python benchmarks/training.py --kinds run --text corpus.txt --png results/training.png
    python benchmarks/training.py --kinds run --text corpus.txt --at-once --seconds 240    both on the GPU, in one time
    python benchmarks/training.py --cpu --out /tmp/x.json       the same code on the CPU, tiny: shows that it runs

Rows by `kind`: ffn_step (16,384 tokens forward and backward through one feed-forward), model_step (a whole step of the
published 0.5 B and 2 B shapes, the same micro-batch on both sides), run (two trainings from random weights on the same
text, dense and with L1: `loss_gap` on held-out text, `sparsity`, curves; what is shipped as text is small enough to be
learned by heart, so give more by --text). `ms` is ours, `dense_ms` the faster of eager and
torch.compile (whole models: compiled), `peak_mb` what a step allocates at most. `relative_error` is the worst among
output and gradients against float32; of whole models that of the loss against the dense one's. Energy is measured where
the GPU has a counter; with --energy it must have one. The file is written after every row; others that it holds stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.energy import counter_if_any
from benchmarks.ledger import Job, Ledger, picked, run_jobs
from benchmarks.training_ffn import ffn_jobs
from benchmarks.training_model import model_jobs
from benchmarks.training_scale import CPU, GPU, Scale
from onekernel.measure.energy import energy_counter

KINDS = ("ffn_step", "model_step", "run")
SAME = ("kind", "model", "pattern", "asked_fraction", "hidden_size", "intermediate_size", "tokens")
"""What makes two rows the same measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kinds that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"what to run: {', '.join(KINDS)}, with commas")
    parser.add_argument("--repeats", type=int, help="timed steps of each kind")
    parser.add_argument("--energy", action="store_true", help="fail where the GPU's energy cannot be read")
    parser.add_argument("--text", type=Path, default=Path("examples/moby-dick.txt"), help="what kind run trains on")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long each training of kind run takes")
    parser.add_argument("--steps", type=int, help="its steps, instead of as many as fit into --seconds")
    parser.add_argument("--l1", type=float, help="its penalty")
    parser.add_argument("--at-once", action="store_true", help="both trainings of kind run at once, on one GPU")
    parser.add_argument("--stop-after", type=float, default=1200.0, help="start nothing new after so many seconds")
    parser.add_argument("--png", type=Path, help="a picture of its curves; needs matplotlib")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/training.json"))
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(
            f"--kinds has {', '.join(sorted(unknown))}; it takes {', '.join(KINDS)}, with a comma between them"
        )
    if options.energy and options.cpu:
        parser.error("--energy reads a GPU's counter, and --cpu has none")
    scale = CPU if options.cpu else GPU
    scale = replace(scale, repeats=options.repeats or scale.repeats)
    about: dict[str, Any] = {"device": "CPU", "driver": "none"}
    counter = None
    if not options.cpu:
        from onekernel.device.facts import facts

        found = facts(scale.device)
        about = {"device": found.name, "driver": found.driver_version}
        read = energy_counter if options.energy else counter_if_any
        counter = read(scale.device, found.uuid)
    ledger = Ledger(options.out, partial(picked, names=SAME), options.commit, **about)
    return run_jobs(jobs(kinds, scale, counter, options), ledger, line, options.stop_after)


def jobs(
    kinds: Sequence[str], scale: Scale, counter: Callable[[], float] | None, options: argparse.Namespace
) -> Iterator[Job]:
    """Yield the measurements of all kinds."""
    for kind in kinds:
        if kind == "ffn_step":
            yield from ffn_jobs(scale, counter)
        elif kind == "model_step":
            yield from model_jobs(scale, counter)
        else:
            from benchmarks import training_runs  # needs msgspec, which the other kinds do without

            asked = training_runs.plan(
                options.text,
                cpu=options.cpu,
                seconds=options.seconds,
                steps=options.steps,
                l1=options.l1,
                png=options.png,
                at_once=options.at_once,
            )
            yield from training_runs.run_jobs(asked, scale, counter)


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    memory = "" if row["peak_mb"] is None else f", {row['peak_mb']:.0f} MB beside {row['dense_peak_mb']:.0f}"
    times = "" if row["ms"] is None else f"{row['ms']['median']:.2f} ms, dense {row['dense_ms']['median']:.2f} ms, "
    rate = "at once" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    return (
        f"{row['kind']} {row.get('model', row.get('route'))} {100 * row['nonzero_fraction']:.2f} %: {times}{rate}"
        f"{memory}, error {row['relative_error']:.4f}"
        + (f", loss gap {row['loss_gap']:+.3f}" if row["kind"] == "run" else "")
    )


if __name__ == "__main__":
    sys.exit(main())
