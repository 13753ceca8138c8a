"""What a value costs on its way from one SM to the others: the figures that decide the megakernel's design.

    python benchmarks/handover.py --commit $(git rev-parse HEAD)     writes results/handover.json
    python benchmarks/handover.py --shim --out /tmp/x.json           the same code on the CPU, tiny: shows that it runs

Rows by `kind`: read (plain read of 2.47 GB: the roofline), phase (a chain of dependent matrix-vector products: a
hand-over between all SMs under load), cluster (a hand-over inside a cluster through distributed shared memory),
resident (how many clusters fit at once, and whether a cooperative launch can have them).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onekernel.device.kernel import Kernel
from onekernel.device.spec import KernelSpec
from onekernel.device.watch import Watch
from onekernel.errors import DeviceError
from onekernel.kernels.machine import HOP_THREADS, READ_ALL, READ_THREADS, cluster_hop, hop_shared_bytes
from onekernel.kernels.ring import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, RingChain, RingPhase, RingShape
from onekernel.measure.results import spread, write_results

MAX_PHASES = 256
FORMULA = "handover_us = us_per_phase - bytes_per_phase / read_gbps"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to run."""

    weight_bytes: int
    chain_steps: int
    hop_rounds: int
    repeats: int
    shapes: tuple[RingShape, ...]
    stages: tuple[int, ...]
    clusters: tuple[int, ...]
    words: tuple[int, ...]


GPU = Sizes(
    weight_bytes=2_470_000_000,
    chain_steps=1_500,
    hop_rounds=2_000,
    repeats=11,
    shapes=(RingShape(8, 2, 12), RingShape(12, 1, 16), RingShape(16, 1, 12)),  # rings of 192 KB
    stages=(1, 2, 8, 16),
    clusters=(2, 4, 8, 16),
    words=(64, 192, 512, 1024),
)
SHIM = Sizes(
    weight_bytes=400_000,
    chain_steps=6,
    hop_rounds=3,
    repeats=2,
    shapes=(RingShape(2, 1, 3),),
    stages=(1, 2),
    clusters=(4,),
    words=(40,),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where kernels run: loading, timing one call in microseconds, and what is known of the device."""

    device: torch.device
    ctas: int
    load: Callable[[KernelSpec], Kernel]
    time_us: Callable[[Callable[[], object]], float]
    resident_ctas: Callable[[Kernel, int, int, int], int]
    facts: dict[str, Any]


def gpu() -> Machine:
    from onekernel.device.cuda_kernel import load_kernel
    from onekernel.device.facts import facts

    found = facts("cuda:0")

    def time_us(call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # about 100 us, in which the host gets ahead: its own time must not count
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def resident(kernel: Any, block: int, shared_bytes: int, cluster: int) -> int:
        return int(kernel.resident_ctas(block, shared_bytes=shared_bytes, cluster=cluster))

    about = {"device": found.name, "driver": found.driver_version}
    return Machine(torch.device("cuda", 0), found.sm_count, load_kernel, time_us, resident, about)


def shim() -> Machine:
    from onekernel.device.shim import ShimKernel

    def time_us(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def resident(kernel: Kernel, block: int, shared_bytes: int, cluster: int) -> int:
        return cluster

    return Machine(torch.device("cpu"), 2, ShimKernel, time_us, resident, {"device": "CPU shim", "driver": "none"})


def samples(machine: Machine, call: Callable[[], object], repeats: int, per: float = 1.0) -> dict[str, float]:
    """Time a call `repeats` times after a warm-up; median, p10 and p90 of microseconds, divided by `per`."""
    call()
    return spread([machine.time_us(call) / per for _ in range(repeats)])


def read(machine: Machine, sizes: Sizes, weights: torch.Tensor) -> tuple[dict[str, Any], float]:
    """Return the row of the best grid, and the SM clock in MHz during it."""
    data = weights.view(torch.int32).view(-1, 4)
    kernel, rows = machine.load(READ_ALL), []
    for per_sm in (1, 2, 4, 8, 16):
        ctas = machine.ctas * per_sm
        sums = torch.zeros(ctas * READ_THREADS, dtype=torch.int32, device=machine.device)
        times = torch.zeros(ctas, 2, dtype=torch.int64, device=machine.device)
        args = [data, len(data), sums, times]
        us = samples(machine, lambda ctas=ctas, args=args: kernel.launch(ctas, READ_THREADS, args), sizes.repeats)
        mhz = statistics.median(1e3 * cycles / max(ns, 1) for cycles, ns in times.tolist())
        rows.append(({"kind": "read", "bytes": data.nbytes, "ctas": ctas, "us": us}, mhz))
    row, mhz = min(rows, key=lambda row: row[0]["us"]["median"])
    return {**row, "gbps": data.nbytes / row["us"]["median"] / 1e3}, mhz


def chain(machine: Machine, shape: RingShape, stages: int, row_tiles: int, weights: torch.Tensor) -> RingChain:
    """Return phases of `stages` stages and `row_tiles` row tiles per CTA, over as much of the weights as there is.

    Every phase takes all values of the one before. Its matrix is as wide as makes the stages full, which need not be
    the number of values: columns beyond them meet zeros, values beyond the columns are taken and not used.
    """
    k_tiles, rest = divmod(stages * shape.warps * shape.tiles, row_tiles)
    if rest:
        raise SystemExit(f"{stages} stages of {shape} do not divide into {row_tiles} row tiles")
    rows = machine.ctas * row_tiles
    size = rows * k_tiles * TILE_BYTES
    count = max(2, min(MAX_PHASES, len(weights) // size))
    phases = tuple(RingPhase(p * size, rows, k_tiles, rows * TILE_ROWS) for p in range(count))
    return RingChain(phases, weights)


def phase_row(
    machine: Machine, sizes: Sizes, shape: RingShape, stages: int, row_tiles: int, window: int, weights: torch.Tensor
) -> dict[str, Any]:
    phases = chain(machine, shape, stages, row_tiles, weights)
    values = phases.phases[0].inputs
    columns = min(values, phases.phases[0].k_tiles * TILE_COLUMNS)
    normals = weights.view(torch.bfloat16)
    normals.mul_(float(columns**-0.5 / normals[: 1 << 20].float().std()))  # values keep their size from phase to phase
    kernel = machine.load(shape.spec())
    tokens = max(1, sizes.chain_steps // len(phases.phases))
    first = torch.randn(values, device=machine.device)
    watch = Watch.create(machine.device, machine.ctas, shape.threads)
    run = phases.prepare(kernel, shape, machine.ctas, first, tokens, watch, window)
    us = samples(machine, run.start, sizes.repeats, per=tokens * len(phases.phases))
    watch.check("ring")
    if not (run.out.isfinite().all() and run.out.any(1).all()):
        raise SystemExit(f"the values of the chain are lost: {run.out.norm(dim=1)}")
    size = machine.ctas * stages * shape.stage_bytes
    return {
        "kind": "phase",
        "warps": shape.warps,
        "stage_bytes": shape.stage_bytes,
        "stages": stages,
        "window": window,
        "values": values,
        "ctas": machine.ctas,
        "phases": tokens * len(phases.phases),
        "bytes_per_phase": size,
        "us_per_phase": us,
    }


def phase_rows(machine: Machine, sizes: Sizes, weights: torch.Tensor) -> Iterator[dict[str, Any]]:
    for shape in sizes.shapes:
        for stages in sizes.stages:
            for window in (2, 3):
                yield phase_row(machine, sizes, shape, stages, 2, window, weights)
    for row_tiles in (1, 4):  # fewer and more values to hand over
        shape = sizes.shapes[-1]
        yield phase_row(machine, sizes, shape, 2, row_tiles, 2, weights)


@dataclass(frozen=True, slots=True)
class Hop:
    """A launch of one of the cluster_hop kernels on all clusters that fit at once."""

    machine: Machine
    entry: str
    kernel: Kernel
    cluster: int
    shared_bytes: int

    @classmethod
    def of(cls, machine: Machine, entry: str, cluster: int, shared_bytes: int) -> Hop:
        """`shared_bytes` is what keeps a second CTA off an SM; the shim has no SMs and takes what the kernel needs."""
        if machine.device.type == "cpu":
            shared_bytes = hop_shared_bytes(64)
        return cls(machine, entry, machine.load(cluster_hop(entry)), cluster, shared_bytes)

    @property
    def ctas(self) -> int:
        return self.machine.resident_ctas(self.kernel, HOP_THREADS, self.shared_bytes, self.cluster)

    def us(self, words: int, rounds: int, repeats: int, cooperative: bool = False) -> dict[str, float]:
        """Time a round."""
        ctas, device = self.ctas, self.machine.device
        watch = Watch.create(device, ctas, HOP_THREADS)
        args = [words, rounds, torch.zeros(ctas * HOP_THREADS, dtype=torch.int32, device=device), *watch.args]

        def run() -> None:
            self.kernel.launch(
                ctas,
                HOP_THREADS,
                args,
                shared_bytes=self.shared_bytes,
                cluster=self.cluster,
                cooperative=cooperative,
            )

        us = samples(self.machine, run, repeats, per=rounds)
        watch.check(self.entry)
        return us


def cluster_rows(machine: Machine, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for way in ("tagged", "async"):
        for cluster in sizes.clusters:
            hop = Hop.of(machine, f"cluster_hop_{way}", cluster, 150 * 1024)
            for words in sizes.words:
                us = hop.us(words, sizes.hop_rounds, sizes.repeats)
                row = {"kind": "cluster", "way": way, "cluster": cluster, "words": words, "ctas": hop.ctas}
                yield {**row, "threads": HOP_THREADS, "rounds": sizes.hop_rounds, "us": us}


def resident_rows(machine: Machine, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for cluster in sizes.clusters:
        hop = Hop.of(machine, "cluster_hop_tagged", cluster, 200 * 1024)
        refused = None
        try:
            hop.us(words=64, rounds=2, repeats=1, cooperative=True)
        except DeviceError as error:
            refused = str(error)
        row = {"kind": "resident", "cluster": cluster, "shared_bytes": hop.shared_bytes, "ctas": hop.ctas}
        yield {**row, "clusters": hop.ctas // cluster, "cooperative": refused is None, "refused": refused}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shim", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/handover.json"))
    options = parser.parse_args(arguments)
    machine, sizes = (shim(), SHIM) if options.shim else (gpu(), GPU)
    torch.manual_seed(0)
    count = sizes.weight_bytes // 2 // 512 * 512
    weights = torch.randn(count, dtype=torch.bfloat16, device=machine.device).view(torch.uint8)

    roofline, mhz = read(machine, sizes, weights)
    rows = [roofline]
    gbps = roofline["gbps"]
    print(f"read: {gbps:.0f} GB/s at {mhz:.0f} MHz", flush=True)
    for row in phase_rows(machine, sizes, weights):
        row["floor_us"] = row["bytes_per_phase"] / gbps / 1e3
        row["handover_us"] = row["us_per_phase"]["median"] - row["floor_us"]
        row["formula"] = FORMULA
        rows.append(row)
        print(
            f"{row['warps']} warps, {row['stages']} stages of {row['stage_bytes']}, window {row['window']}, "
            f"{row['values']} values: {row['us_per_phase']['median']:.2f} us, hand-over {row['handover_us']:.2f}",
            flush=True,
        )
    for row in [*cluster_rows(machine, sizes), *resident_rows(machine, sizes)]:
        rows.append(row)
        print(row, flush=True)
    write_results(
        options.out, rows, commit=options.commit, sm_clock_mhz=round(mhz), read_gbps=round(gbps, 1), **machine.facts
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
