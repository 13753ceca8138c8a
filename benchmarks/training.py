"""Training of sparse feed-forwards beside dense ones, eager and compiled.

    python benchmarks/training.py                               all of it on one GPU: writes results/training.json
    python benchmarks/training.py --kinds ffn_step              one kind of rows
    python benchmarks/training.py --kinds run --text corpus.txt --png results/training.png
    python benchmarks/training.py --cpu --out /tmp/x.json       the same code on the CPU, tiny: shows that it runs

Rows by `kind`: ffn_step (16,384 tokens forward and backward through one feed-forward), model_step (a whole step of the
published 0.5 B and 2 B shapes, the same micro-batch on both sides), run (two trainings from random weights on the same
text, dense and with L1: `loss_gap` on held-out text, `sparsity`, curves; what is shipped as text is small enough to be
learned by heart, so give more by --text). `ms` is ours, `dense_ms` the faster of eager and
torch.compile (whole models: compiled), `peak_mb` what a step allocates at most. `relative_error` is the worst among
output and gradients against float32; of whole models that of the loss against the dense one's. Energy is measured where
the GPU has a counter; with --energy it must have one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.energy import counter_if_any
from benchmarks.training_ffn import ffn_rows
from benchmarks.training_model import model_rows
from benchmarks.training_runs import plan, run_rows
from benchmarks.training_scale import CPU, GPU, Scale
from onekernel.measure.energy import energy_counter
from onekernel.measure.results import write_results

KINDS = ("ffn_step", "model_step", "run")
Rows = Callable[[Scale, Callable[[], float] | None], Iterator[dict[str, Any]]]
"""What makes the rows of a kind."""


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
    asked = plan(
        options.text, cpu=options.cpu, seconds=options.seconds, steps=options.steps, l1=options.l1, png=options.png
    )
    rows_of: dict[str, Rows] = {"ffn_step": ffn_rows, "model_step": model_rows, "run": partial(run_rows, asked)}
    scale = CPU if options.cpu else GPU
    scale = replace(scale, repeats=options.repeats or scale.repeats)
    about: dict[str, Any] = {"device": "CPU", "driver": "none"}
    counter = None
    if not options.cpu:
        from onekernel.device.facts import facts

        found = facts(scale.device)
        about = {"device": found.name, "driver": found.driver_version}
        read = energy_counter if options.energy else counter_if_any
        counter = read(scale.device, f"GPU-{torch.cuda.get_device_properties(scale.device).uuid}")
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for row in rows_of[kind](scale, counter):
            rows.append(row)
            print(line(row), flush=True)
    write_results(options.out, rows, commit=options.commit, **about)
    return 0


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    memory = "" if row["peak_mb"] is None else f", {row['peak_mb']:.0f} MB beside {row['dense_peak_mb']:.0f}"
    return (
        f"{row['kind']} {row.get('model', row.get('route'))} {100 * row['nonzero_fraction']:.2f} %: "
        f"{row['ms']['median']:.2f} ms, dense {row['dense_ms']['median']:.2f} ms, {row['speedup']:.2f}x{memory}, "
        f"error {row['relative_error']:.4f}" + (f", loss gap {row['loss_gap']:+.3f}" if row["kind"] == "run" else "")
    )


if __name__ == "__main__":
    sys.exit(main())
