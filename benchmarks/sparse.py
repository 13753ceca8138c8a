"""The sparse feed-forward beside the dense one, eager and compiled, alone and inside whole models.

    python benchmarks/sparse.py                               all of it on one GPU: writes results/sparse.json
    python benchmarks/sparse.py --real real.pt                with the layer that train_sparse.py kept
    python benchmarks/sparse.py --cpu --out /tmp/x.json       the same code on the CPU, tiny: shows that it runs

Rows by `kind`: batched (16,384 tokens through one feed-forward), decode (1 and 8 tokens, in a CUDA graph), model (64 x
2,048 tokens through the body of the published 0.5 B and 2 B shapes). `us` is ours, `dense_us` the faster of eager and
torch.compile (eager alone for whole models), interleaved in one process. `relative_error` is against float32. The file
is written after every row; rows of other measurements that it holds stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.energy import counter_if_any
from benchmarks.ledger import Job, Ledger, picked, run_jobs
from benchmarks.sparse_layer import Layer, dense
from benchmarks.sparse_models import model_jobs
from benchmarks.sparse_patterns import Pattern, iid, skew
from benchmarks.sparse_timing import CPU, GPU, Scale, error, finish, interleaved, per_token
from onekernel.ops.sparse_module import SparseFFN
from onekernel.weights.neuron_rows import DownProjection


def settle(ffn: SparseFFN, x: torch.Tensor, device: str) -> None:
    """Let it measure, choose, put its neurons in order and see whether tiles overflow."""
    for _ in range(4):
        ffn(x)
        finish(device)


SAME = ("kind", "pattern", "model", "asked_fraction", "hidden_size", "intermediate_size", "tokens")
"""What makes two rows the same measurement."""


def compare(scale: Scale, layer: Layer, counter: Callable[[], float] | None) -> dict[str, Any]:
    """Return what all rows of single feed-forwards have: times, error, route and energy."""
    compiled = compiled_for(scale.device, *layer.x.shape, len(layer.gate))
    ffn = SparseFFN(layer.gate.clone(), layer.up.clone(), DownProjection.from_linear(layer.down))
    settle(ffn, layer.x, scale.device)
    seen = ffn.measured
    if seen is None:
        raise SystemExit("the first call's counts did not arrive")
    weights = (layer.gate, layer.up, layer.down)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ffn(layer.x),
        "eager": lambda: dense(layer.x, *weights),
        "compiled": lambda: compiled(layer.x, *weights),
    }
    if len(layer.x) <= 64 and scale.device.startswith("cuda"):
        calls = {name: graphed(call) for name, call in calls.items()}
    us = interleaved(calls, scale.repeats, scale.device)
    best = min(("eager", "compiled"), key=lambda name: us[name]["median"])
    return {
        "hidden_size": layer.x.shape[1],
        "intermediate_size": len(layer.gate),
        "tokens": len(layer.x),
        "nonzero_fraction": seen.nonzero_fraction,
        "fullest_row": seen.fullest_row,
        "us": us["ours"],
        "dense_us": us[best],
        "dense": best,
        "speedup": us[best]["median"] / us["ours"]["median"],
        "relative_error": error(ffn(layer.x), layer.float32()),
        "dense_relative_error": error(dense(layer.x, *weights), layer.float32()),
        "route": seen.route.name,
        "hot_neurons": seen.route.hot,
        "overflowed_rows": seen.overflowed_rows,
        "mj_per_token": per_token(scale, counter, calls["ours"], us["ours"]["median"], len(layer.x)),
        "dense_mj_per_token": per_token(scale, counter, calls[best], us[best]["median"], len(layer.x)),
    }


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call as a CUDA graph: for few tokens the host's time would be all that is measured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def patterns(scale: Scale, tokens: int, inner: int) -> Iterator[Pattern]:
    for fraction in scale.fractions:
        yield skew(fraction, 0, tokens, inner)
        yield iid(fraction, tokens, inner)


@lru_cache(maxsize=1)
def compiled_for(device: str, tokens: int, hidden: int, inner: int) -> Callable[..., torch.Tensor]:
    """Return the dense feed-forward compiled for these sizes alone: after others PyTorch would make them variable.

    A CPU's run only shows that rows come.
    """
    if not device.startswith("cuda"):
        return dense
    torch.compiler.reset()
    return torch.compile(dense, dynamic=False)


def layer_jobs(scale: Scale, real: Path | None, counter: Callable[[], float] | None) -> Iterator[Job]:
    """Yield the measurements of single feed-forwards."""

    def of(kind: str, pattern: Pattern) -> dict[str, Any]:
        layer = Layer.of(pattern, scale.hidden, scale.device)
        about = {"kind": kind, "pattern": pattern.name, "asked_fraction": pattern.fraction}
        return about | compare(scale, layer, counter)

    def saved(path: Path) -> dict[str, Any]:
        return {"kind": "batched", "pattern": "real", **compare(scale, Layer.saved(path, scale.device), counter)}

    if real is not None:
        yield "the trained layer", partial(saved, real)
    for inner in scale.inners:
        for pattern in patterns(scale, scale.tokens, inner):
            yield f"{pattern.name} {pattern.fraction} of {inner}", partial(of, "batched", pattern)
    for tokens in scale.decode_tokens:
        for pattern in (skew(0.01, 0, tokens, scale.inners[0]), iid(0.1, tokens, scale.inners[0])):
            yield f"{tokens} tokens, {pattern.name} {pattern.fraction}", partial(of, "decode", pattern)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--kinds", default="layers,model", help="what to run: layers, model, or both")
    parser.add_argument("--real", type=Path, help="what train_sparse.py wrote")
    parser.add_argument("--repeats", type=int, help="timed calls of each kind")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after this long (default: 420)")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/sparse.json"))
    options = parser.parse_args(arguments)
    kinds = set(options.kinds.split(","))
    if unknown := kinds - {"layers", "model"}:
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; it takes layers and model, with a comma between them")
    scale = CPU if options.cpu else GPU
    scale = replace(scale, repeats=options.repeats or scale.repeats)
    about: dict[str, Any] = {"device": "CPU", "driver": "none"}
    counter = None
    if not options.cpu:
        from onekernel.device.facts import facts

        found = facts(scale.device)
        about = {"device": found.name, "driver": found.driver_version}
        counter = counter_if_any(scale.device, found.uuid)
    jobs: list[Job] = []
    if "layers" in kinds:
        jobs += layer_jobs(scale, options.real, counter)
    if "model" in kinds:
        jobs += model_jobs(scale, counter)
    ledger = Ledger(options.out, partial(picked, names=SAME), options.commit, **about)
    with torch.inference_mode():
        return run_jobs(jobs, ledger, line, options.seconds)


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    return (
        f"{row['kind']} {row['pattern']} {row['intermediate_size']} {100 * row['nonzero_fraction']:.2f} %: "
        f"{row['us']['median']:.0f} us by {row['route']}, dense {row['dense_us']['median']:.0f} us ({row['dense']}), "
        f"{row['speedup']:.2f}x, error {row['relative_error']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
