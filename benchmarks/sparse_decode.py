"""The megakernel with sparse feed-forwards beside the dense ones: decode rows of results/sparse.json.

    python benchmarks/sparse_decode.py --energy               all of it on one GPU
    python benchmarks/sparse_decode.py --shim --out /tmp/x.json    the same code on the CPU, tiny: shows that it runs

Rows by `kind`: megakernel_ffn (a plan of nothing but feed-forward phases, and the token's ends, whose time is measured
alone and taken off) and megakernel_model (whole models, the cache holding zeros). Times are of launches on the device,
by events, sparse and dense in turns. `roofline_us` is the time of reading what a token reads, with the neurons that
fired in this run, at the rate of a plain read of the same weights. Other rows of the file stay.

Which neurons fire is fixed: a constant hidden channel, which no layer writes to, gives each gate a bias.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import handover
from benchmarks.energy import counter_if_any, millijoules_per_call
from benchmarks.ledger import Job, Ledger, Row, run_jobs
from onekernel.config import ModelConfig
from onekernel.device.kernel import Kernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.megakernel import Megakernel
from onekernel.engine.memory import pages_for
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.measure.results import spread
from onekernel.models.model import LayerWeights
from onekernel.models.packed import PackedModel, allocate, pack_embedding, pack_final_norm, pack_layer, pack_matrix
from onekernel.phases.attention.cache import KVCache
from onekernel.plan.abi import Kind
from onekernel.plan.limits import Limits
from onekernel.plan.plan import PhaseInfo, Plan, make_plan

ENDS = (Kind.EMBED, Kind.HEAD, Kind.CHOOSE)
FEED_FORWARD = (*ENDS, Kind.GATE_UP, Kind.DOWN, Kind.GATE, Kind.GATHER)
KINDS = ("megakernel_ffn", "megakernel_model")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to run, and where."""

    ffn: ModelConfig
    models: dict[str, ModelConfig]
    fractions: tuple[float, ...]
    prompt: int
    new: int
    repeats: int
    limits: dict[str, int]


def llama(layers: int, inner: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelConfig:
    """Return a Llama of hidden size 2,048 with a ReLU."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=2048,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        hidden_act="relu",
    )


GPU = Scale(
    ffn=llama(16, 8192, 32, 8, 2112, tied=True),
    models={
        "Llama-3.2-1B shape": llama(16, 8192, 32, 8, 128256, tied=True),
        "published 2B shape": llama(38, 5632, 32, 32, 49152, tied=False),
    },
    fractions=(0.01, 0.05, 0.1, 0.3, 0.5, 1.0),
    prompt=64,
    new=128,
    repeats=9,
    limits={},
)
_TINY = replace(llama(2, 96, 4, 2, 160, tied=True), hidden_size=64, head_dim=16)
SHIM = Scale(_TINY, {"tiny": _TINY}, (0.1, 1.0), 3, 2, 1, {"consumer_warps": 4, "stage_bytes": 4096})


@dataclass(frozen=True, slots=True)
class Rig:
    """Where kernels run: a CTA on each of `ctas` SMs; `time_us` times a call; `read_gbps` reads an arena."""

    device: str
    ctas: int
    stages: int | None
    load: Callable[[KernelSpec], Kernel]
    time_us: Callable[[Callable[[], object]], float]
    read_gbps: Callable[[torch.Tensor], float]
    about: dict[str, Any]
    arch: str


def gpu() -> Rig:
    from benchmarks.sparse_timing import time_us
    from onekernel.device.cuda_kernel import load_kernel
    from onekernel.device.facts import facts
    from onekernel.device.support import architecture

    found, machine = facts("cuda:0"), handover.gpu()
    return Rig(
        "cuda:0",
        found.sm_count,
        None,
        lambda spec: load_kernel(spec, "cuda:0"),
        lambda call: time_us(call, "cuda:0"),
        lambda arena: float(handover.read(machine, handover.GPU, arena)[0]["gbps"]),
        {"device": found.name, "driver": found.driver_version},
        architecture(found),
    )


def shim() -> Rig:
    from onekernel.device.shim import ShimKernel

    def time_us(call: Callable[[], object]) -> float:
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e6

    about = {"device": "CPU shim", "driver": "none"}
    return Rig("cpu", 2, 5, ShimKernel, time_us, lambda arena: 1.0, about, "sm_90a")


def only(plan: Plan, kinds: Sequence[Kind]) -> Plan:
    """Return the plan without the phases of other kinds: each takes what the one before it gives."""
    kept = [phase for phase in plan.phases if phase.kind in kinds]
    tasks = plan.tasks[:, [phase.index for phase in kept]].copy()
    tasks["in_phase"] = (np.arange(len(kept)) - 1) % len(kept)
    header = plan.header.copy()
    header["phases"] = len(kept)
    phases = tuple(PhaseInfo(phase.kind, phase.layer, index) for index, phase in enumerate(kept))
    return replace(plan, header=header, tasks=tasks, phases=phases)


def random_layer(config: ModelConfig, fraction: float, draw: torch.Generator) -> LayerWeights:
    """Return a layer of which that fraction of the neurons fires, drawn anew for each layer."""
    device = draw.device

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=draw, device=device, dtype=torch.bfloat16)
        return values.mul_(gain * columns**-0.5)

    hidden, inner = config.hidden_size, config.intermediate_size
    out, down, gate_up = matrix(hidden, config.q_size, 0.02), matrix(hidden, inner, 0.02), matrix(2 * inner, hidden)
    out[-1] = 0
    down[-1] = 0
    gate_up[:inner].mul_(0.05)
    gate_up[:inner, -1] = -1.0
    gate_up[torch.randperm(inner, generator=draw, device=device)[: round(fraction * inner)], -1] = 1.0
    ones = torch.ones(hidden, device=device)
    qkv = matrix(config.q_size + 2 * config.kv_size, hidden)
    return LayerWeights(ones, qkv, None, None, None, out, None, ones, gate_up, None, down, None)


def packed_model(plan: Plan, fraction: float, device: str) -> PackedModel:
    """Return random weights in a plan's layout; the same for every plan of a model and fraction."""
    config, draw = plan.config, torch.Generator(device).manual_seed(0)
    packed = allocate(config, plan.layout, device)
    for layer in range(config.num_hidden_layers):
        pack_layer(packed, layer, random_layer(config, fraction, draw))
    table = torch.randn(config.vocab_size, config.hidden_size, generator=draw, device=device, dtype=torch.bfloat16)
    table[:, -1] = 4.0
    pack_embedding(packed, table)
    if not plan.layout.embed_packed:
        pack_matrix(packed, "head", 0, table)
    pack_final_norm(packed, torch.ones(config.hidden_size, device=device))
    return packed


def megakernel(rig: Rig, plan: Plan, packed: PackedModel) -> Megakernel:
    """Return a kernel for a plan, with a cache of zeros."""
    limits = plan.limits
    shape = MegakernelShape.of(
        plan.config,
        sequences=1,
        warps=limits.consumer_warps,
        stages=min(rig.stages or plan.shared.stages, plan.shared.stages),
        sparse=plan.layout.sparse,
    )
    cache = KVCache.allocate(plan.config, limits.num_pages, torch.bfloat16, rig.device)
    cache.pages.zero_()
    return Megakernel(plan, packed, cache, rig.load(shape.spec(rig.arch)), shape)


def jobs(rig: Rig, scale: Scale, counter: Callable[[], float] | None, kinds: Sequence[str]) -> Iterator[Job]:
    """Yield all measurements of these kinds."""

    def of(kind: str, name: str, config: ModelConfig, fraction: float) -> Job:
        return f"{name}, {fraction}", partial(row, rig, scale, kind, name, config, fraction, counter)

    if "megakernel_model" in kinds:
        for name, config in scale.models.items():
            yield of("megakernel_model", name, config, min(scale.fractions))
    if "megakernel_ffn" in kinds:
        for fraction in scale.fractions:
            yield of("megakernel_ffn", "Llama-3.2-1B shape", scale.ffn, fraction)


def same(row: Row) -> Hashable:
    """Return what makes two rows the same measurement: which neurons fire is fixed, so their share is known."""
    return row["kind"], row.get("model"), row.get("pattern"), round(row.get("nonzero_fraction", 0.0), 2)


def row(
    rig: Rig,
    scale: Scale,
    kind: str,
    name: str,
    config: ModelConfig,
    fraction: float,
    counter: Callable[[], float] | None,
) -> dict[str, Any]:
    """Return one comparison: the same weights behind both plans."""
    context, alone = scale.prompt + scale.new, kind == "megakernel_ffn"
    limits = Limits(ctas=rig.ctas, max_context=context, num_pages=pages_for(context), **scale.limits)
    table = torch.arange(limits.table_pages, dtype=torch.int32, device=rig.device)[None]
    kernels: dict[str, Megakernel] = {}
    for side, active_fraction in (("sparse", fraction), ("dense", None)):
        plan = make_plan(config, limits, active_fraction=active_fraction)
        packed = packed_model(plan, fraction, rig.device)
        kernels[side] = megakernel(rig, only(plan, FEED_FORWARD) if alone else plan, packed)
    if alone:
        dense = kernels["dense"]
        kernels["ends"] = megakernel(rig, only(dense.plan, ENDS), dense.packed)

    def call(side: str) -> Callable[[], object]:
        kernel = kernels[side]
        pages = kernel.plan.block_pages_after(scale.prompt)
        return lambda: kernel.launch([1], [scale.prompt - 1], table, scale.new, block_pages=pages)

    samples: dict[str, list[float]] = {side: [] for side in kernels}
    for turn in range(scale.repeats + 1):
        for side in kernels:
            took = rig.time_us(call(side)) / scale.new
            kernels[side].check()
            if turn:
                samples[side].append(took)
    us = {side: spread(values) for side, values in samples.items()}
    ends = us["ends"]["median"] if alone else 0.0
    rate = rig.read_gbps(kernels["dense"].packed.arena)
    active = kernels["sparse"].active_neurons() or ()
    kv_bytes = 0 if alone else (scale.prompt + scale.new // 2) * config.kv_bytes_per_token()
    read = {side: bytes_read(kernels[side].plan, active) + kv_bytes for side in ("sparse", "dense")}
    floors = {side: value / rate / 1e3 for side, value in read.items()}
    times = {side: us[side]["median"] - ends for side in read}
    return {
        "kind": kind,
        "pattern": "fixed",
        "model": name,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "prompt_tokens": scale.prompt,
        "new_tokens": scale.new,
        "nonzero_fraction": sum(active) / max(1, len(active)) / config.intermediate_size,
        "us": us["sparse"],
        "dense_us": us["dense"],
        "ends_us": ends,
        "speedup": times["dense"] / times["sparse"],
        "bytes_per_token": read["sparse"],
        "dense_bytes_per_token": read["dense"],
        "read_gbps": round(rate, 1),
        "roofline_us": floors["sparse"],
        "dense_roofline_us": floors["dense"],
        "percent_of_roofline": 100 * floors["sparse"] / times["sparse"],
        "dense_percent_of_roofline": 100 * floors["dense"] / times["dense"],
        "mj_per_token": energy(counter, call("sparse"), us["sparse"]["median"], scale),
        "dense_mj_per_token": energy(counter, call("dense"), us["dense"]["median"], scale),
    }


def bytes_read(plan: Plan, active: Sequence[float]) -> int:
    """Return the bytes of weights that a token reads of a plan's layer and head phases, with so many neurons firing."""
    ends = sum(place.total_bytes for key, place in plan.layout.matrices.items() if key[0] == "head")
    kinds = {phase.kind for phase in plan.phases}
    if Kind.QKV not in kinds:  # the time of the ends is taken off, so what they read is left out
        ends = 0
    layers = sum(
        place.total_bytes
        for key, place in plan.layout.matrices.items()
        if key[0] != "head" and Kind[key[0].upper()] in kinds
    )
    neurons = sum(active[layer] * place.neuron_bytes for layer, place in plan.layout.neurons.items())
    return int(ends + layers + neurons)


def energy(
    counter: Callable[[], float] | None, call: Callable[[], object], us_per_token: float, scale: Scale
) -> float | None:
    """Return millijoules per token over about a second, or None where nothing counts them."""
    calls = max(1, int(1e6 / (us_per_token * scale.new)))

    def run() -> None:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()

    used = millijoules_per_call(counter, run, 1)
    return None if used is None else used / calls / scale.new


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write the rows beside those of other kinds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shim", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--energy", action="store_true", help="also millijoules per token, from the GPU's counter")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"what to run: {', '.join(KINDS)}, with commas")
    parser.add_argument("--repeats", type=int, help="timed launches of each side")
    parser.add_argument("--seconds", type=float, default=420.0, help="start nothing new after this long (default: 420)")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/sparse.json"))
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; it takes {', '.join(KINDS)}")
    rig, scale = (shim(), SHIM) if options.shim else (gpu(), GPU)
    scale = replace(scale, repeats=options.repeats or scale.repeats)
    counter = None
    if options.energy and not options.shim:
        counter = counter_if_any(rig.device, f"GPU-{torch.cuda.get_device_properties(rig.device).uuid}")
    ledger = Ledger(options.out, same, options.commit, **rig.about)
    with torch.inference_mode():
        return run_jobs(jobs(rig, scale, counter, kinds), ledger, line, options.seconds)


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    return (
        f"{row['kind']} {row['model']} {100 * row['nonzero_fraction']:.2f} %: {row['us']['median']:.1f} us a token, "
        f"dense {row['dense_us']['median']:.1f}, {row['speedup']:.2f}x, "
        f"{row['percent_of_roofline']:.0f} % of its roofline"
    )


if __name__ == "__main__":
    sys.exit(main())
