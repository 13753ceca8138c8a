"""Training of sparse feed-forwards beside dense ones, eager and compiled.

    python benchmarks/training.py                               all of it on one GPU: writes results/training.json
    python benchmarks/training.py --kinds ffn_step              one kind of rows
    python benchmarks/training.py --cpu --out /tmp/x.json       the same code on the CPU, tiny: shows that it runs

Rows by `kind`: ffn_step (16,384 tokens forward and backward through one feed-forward), model_step (a whole step of the
published 0.5 B and 2 B shapes, the same micro-batch on both sides). `ms` is ours, `dense_ms` the faster of eager and
torch.compile (whole models: compiled), `peak_mb` what a step allocates at most. `relative_error` is the worst among
output and gradients against float32; of whole models that of the loss against the dense one's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.energy import counter_if_any
from benchmarks.training_ffn import ffn_rows
from benchmarks.training_model import model_rows
from benchmarks.training_scale import CPU, GPU, Scale
from onekernel.measure.results import write_results

KINDS: dict[str, Callable[[Scale, Callable[[], float] | None], Iterator[dict[str, Any]]]] = {
    "ffn_step": ffn_rows,
    "model_step": model_rows,
}
"""What makes the rows of each kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the kinds that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"what to run: {', '.join(KINDS)}, with commas")
    parser.add_argument("--repeats", type=int, help="timed steps of each kind")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/training.json"))
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(
            f"--kinds has {', '.join(sorted(unknown))}; it takes {', '.join(KINDS)}, with a comma between them"
        )
    scale = CPU if options.cpu else GPU
    scale = replace(scale, repeats=options.repeats or scale.repeats)
    about: dict[str, Any] = {"device": "CPU", "driver": "none"}
    counter = None
    if not options.cpu:
        from onekernel.device.facts import facts

        found = facts(scale.device)
        about = {"device": found.name, "driver": found.driver_version}
        counter = counter_if_any(scale.device, f"GPU-{torch.cuda.get_device_properties(scale.device).uuid}")
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for row in KINDS[kind](scale, counter):
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
        f"error {row['relative_error']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
