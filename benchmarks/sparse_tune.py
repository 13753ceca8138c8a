"""What each sparse kernel takes in several forms, and the whole at several shares of hot neurons: one GPU, no file.

    python benchmarks/sparse_tune.py

From its figures follow the defaults of `SparseShape` and of `Costs` (ops/sparse_route.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.sparse_layer import Layer
from benchmarks.sparse_patterns import iid, skew
from benchmarks.sparse_timing import GPU, Scale, finish, interleaved
from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import Slices, SparseKernels, SparseShape
from onekernel.ops.sparse_module import SparseFFN
from onekernel.ops.sparse_route import Route
from onekernel.weights.neuron_rows import DownProjection


class Stopwatch:
    """A kernel whose launches are timed, to see what each part takes."""

    def __init__(self, kernel: Any, times: list[tuple[str, Any, Any]]) -> None:
        self.kernel, self.times, self.spec = kernel, times, kernel.spec

    def launch(self, *args: Any, **options: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.kernel.launch(*args, **options)
        end.record()
        self.times.append((self.spec.entry, begin, end))


FORMS: tuple[SparseShape, ...] = (
    SparseShape(),
    SparseShape(up_columns=128, up_warps=16),
    SparseShape(up_warps=16),
    SparseShape(up_warps=32),
    SparseShape(down_warps=16),
    SparseShape(down_warps=24),
    SparseShape(pack_warps=4),
)


@torch.inference_mode()
def tune(scale: Scale) -> None:
    """Print what each kernel takes in every form, for 1 % nonzeros, and the whole at every share of hot neurons."""
    from onekernel.device.cuda_kernel import load_kernel
    from onekernel.device.facts import facts

    sms = facts(scale.device).sm_count
    for inner in scale.inners:
        for pattern in (iid(0.01, scale.tokens, inner), skew(0.01, 0, scale.tokens, inner)):
            layer = Layer.of(pattern, scale.hidden, scale.device)
            rows, out = layer.down.t().contiguous(), torch.empty_like(layer.x)
            values = F.linear(layer.x, layer.gate)
            totals = torch.zeros(4, dtype=torch.int32, device=scale.device)
            for form in FORMS:
                times: list[tuple[str, Any, Any]] = []
                try:
                    slices = Slices.plan(form, scale.hidden, inner, capacity=128)
                except ConfigError as error:
                    print(inner, pattern.name, form, error, flush=True)
                    continue
                kernels = SparseKernels(form, lambda spec, kept=times: Stopwatch(load_kernel(spec), kept), sms)
                for _ in range(scale.repeats):
                    kernels.sliced(layer.x, values, layer.up, rows, slices, totals, out, accumulate=False)
                finish(scale.device)
                parts: dict[str, list[float]] = defaultdict(list)
                for name, begin, end in times[len(times) // scale.repeats * 2 :]:
                    parts[name].append(begin.elapsed_time(end) * 1e3)
                medians = {name: round(statistics.median(us), 1) for name, us in parts.items()}
                print(inner, pattern.name, form, medians, flush=True)
            for hot in (0, *(inner // 64 * share // 16 * 64 for share in (1, 2, 3, 4, 6))):
                route = Route("hot_cold" if hot else "sliced", hot)
                ffn = SparseFFN(layer.gate.clone(), layer.up, DownProjection.from_rows(rows), route=route)
                order = (values > 0).sum(0).argsort(descending=True)
                ffn._reorder(order)
                us = interleaved({"ours": lambda f=ffn, x=layer.x: f(x)}, scale.repeats, scale.device)["ours"]
                print(inner, pattern.name, route, us, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=GPU.repeats, help=f"timed calls (default: {GPU.repeats})")
    parser.add_argument("--inner", type=int, nargs="+", default=GPU.inners, help="intermediate sizes")
    options = parser.parse_args(arguments)
    tune(replace(GPU, repeats=options.repeats, inners=tuple(options.inner)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
