"""Products with ternary weights beside bf16 ones: results/ternary.json.

    python benchmarks/ternary.py --commit $(git rev-parse HEAD)     on a GPU, at most four minutes
    python benchmarks/ternary.py --shim --out /tmp/x.json           the same code on the CPU, tiny: shows that it runs

Rows by `kind`. gemv: one matrix and `batch` tokens, every build worth trying (`variant`; `chosen` is what the operator
takes), in a CUDA graph of at least 64 launches that do not overlap, on copies of the weights that together exceed the
L2 several times. prefill with a `shape`: the same for many tokens. prefill with a `model`: a prompt's keys, values in
all layers, ours as the engine makes them from a list of ids (`us`) and its launches in a CUDA graph (`graph_us`), the
reference eager PyTorch with scaled_dot_product_attention, without rotary embedding and cache. `reference_us` is bf16
cuBLAS, or that model, taking turns with ours in the same process.
`gpu_mb` are our weights, `reference_gpu_mb` the other's. Every product is compared with exact integers first. Rows that
a run does not come to stay in the file, as do those of whole models in the megakernel, which come from
benchmarks/ternary_decode.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from onekernel.config import PAGE_TOKENS, ModelConfig, Ternary
from onekernel.device.kernel import BindableKernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.ternary_prefill import TernaryPrefill
from onekernel.kernels.machine import READ_ALL, READ_THREADS
from onekernel.kernels.ternary.prefill import CANDIDATES, PrefillShape
from onekernel.kernels.ternary.product import UNIT_BYTES, ProductShape, variants
from onekernel.kernels.ternary.wgmma import WgmmaShape, wgmma_shapes
from onekernel.measure.results import rows_of_kinds, spread, write_results
from onekernel.models.model import LayerWeights
from onekernel.models.packed import PackedModel, allocate, pack_embedding, pack_layer
from onekernel.ops.ternary_launch import LinearShape, TernaryLauncher
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.ternary import TernaryReference
from onekernel.weights.arena import TileRows, weight_layout
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles

Call = Callable[[], object]
Timer = Callable[[], float]
"""Runs a sequence of calls and returns microseconds per call."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's dimensions, as far as its prefill depends on them."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    def config(self, layers: int) -> ModelConfig:
        """Return the model with that many layers, and a small vocabulary."""
        return ModelConfig(
            architecture="bitnet",
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=512,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            hidden_act="relu2",
            tie_word_embeddings=True,
            sub_norms=True,
            ternary=Ternary(),
        )

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(N, K) of the fused projections of a layer: qkv, o, gate and up, down."""
        q = self.heads * self.head_dim
        qkv = q + 2 * self.kv_heads * self.head_dim
        return [(qkv, self.hidden), (self.hidden, q), (2 * self.inner, self.hidden), (self.hidden, self.inner)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to run."""

    shapes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    """Of the matrix-vector kernels; the first is tried with every build."""
    prefill: tuple[PrefillShape, ...]
    """Builds that are tried for many tokens."""
    prompt: int
    model: ModelShape
    rotated_bytes: int
    launches: int
    repeats: int


BITNET_2B = ModelShape("bitnet-b1.58-2B-4T", 2560, 6912, 20, 5, 128, 30)
SHAPES = (
    (2560, 2560),
    (3840, 2560),
    (13824, 2560),
    (2560, 6912),
    (3200, 3200),
    (4800, 3200),
    (3200, 10240),
    (20480, 3200),
)
GPU = Sizes(
    shapes=SHAPES,
    batches=(1, 2, 4, 8),
    prefill=CANDIDATES,
    prompt=512,
    model=BITNET_2B,
    rotated_bytes=300_000_000,
    launches=64,
    repeats=15,
)
SHIM = Sizes(
    shapes=((48, 512),),
    batches=(1, 2),
    prefill=CANDIDATES[-1:],
    prompt=17,
    model=ModelShape("tiny", 64, 96, 2, 1, 32, 2),
    rotated_bytes=16_000,
    launches=2,
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where kernels run, how calls are timed there, and what is known of the device."""

    device: torch.device
    sms: int
    load: Callable[[KernelSpec], BindableKernel]
    timer: Callable[[Sequence[Call]], Timer]
    eager_timer: Callable[[Sequence[Call]], Timer]
    about: dict[str, Any]
    wgmma: bool = False


def on_gpu() -> Machine:
    from onekernel.device.cuda_kernel import load_operator
    from onekernel.device.facts import facts

    found = facts("cuda:0")

    def time_us(run: Call, calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # about 100 us, in which the host gets ahead: its own time must not count
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    def recorded(calls: Sequence[Call]) -> Timer:
        for call in calls[:2]:
            call()  # loads kernels and cuBLAS's workspace
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return lambda: time_us(graph.replay, len(calls))  # the calls hold what the graph reads

    def eager(calls: Sequence[Call]) -> Timer:
        return partial(time_us, lambda: [call() for call in calls], len(calls))

    about = {"device": found.name, "driver": found.driver_version}
    return Machine(
        torch.device("cuda", 0), found.sm_count, load_operator, recorded, eager, about, found.capability == (9, 0)
    )


def on_shim() -> Machine:
    from onekernel.device.shim import ShimKernel

    def eager(calls: Sequence[Call]) -> Timer:
        def run() -> float:
            begin = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - begin) * 1e6 / len(calls)

        return run

    return Machine(torch.device("cpu"), 2, ShimKernel, eager, eager, {"device": "CPU shim", "driver": "none"})


def taking_turns(timers: Sequence[Timer], repeats: int) -> list[dict[str, float]]:
    """Run all timers once unmeasured, then in turn; return the spread of each."""
    samples: list[list[float]] = [[] for _ in timers]
    for turn in range(repeats + 1):
        for timer, found in zip(timers, samples, strict=True):
            us = timer()
            if turn:
                found.append(us)
    return [spread(found) for found in samples]


def read_gbps(machine: Machine, size: int, repeats: int) -> float:
    """Return the rate of a plain read of `size` bytes with the best of five grids: the floor's denominator."""
    data = torch.zeros(size // 16, 4, dtype=torch.int32, device=machine.device)
    kernel, timers = machine.load(READ_ALL), []
    for ctas in (machine.sms * per_sm for per_sm in (1, 2, 4, 8, 16)):
        sums = torch.zeros(ctas * READ_THREADS, dtype=torch.int32, device=machine.device)
        times = torch.zeros(ctas, 2, dtype=torch.int64, device=machine.device)
        args = [data, len(data), sums, times]
        timers.append(machine.timer([partial(kernel.launch, ctas, READ_THREADS, args)]))
    return data.nbytes / min(us["median"] for us in taking_turns(timers, repeats)) / 1e3


def random_matrix(n: int, k: int, device: torch.device) -> TernaryMatrix:
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8, device=device)
    return TernaryMatrix(codes, torch.full((1,), k**-0.5, device=device))


def random_tokens(tokens: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randint(-127, 128, (tokens, k), dtype=torch.int8, device=device)
    return q, torch.rand(tokens, device=device) + 50


def rotated(weight: PackedTernary, sizes: Sizes) -> list[PackedTernary]:
    """Return copies with other contents, as many as exceed the L2; a copy is one allocation's slice."""
    count = max(2, -(-sizes.rotated_bytes // weight.nbytes))
    copies = torch.stack([weight.codes.roll(i, 0) for i in range(count)])
    return [weight, *(replace(weight, codes=codes) for codes in copies[1:])]


def cycle(calls: Sequence[Call], launches: int) -> list[Call]:
    return [calls[i % len(calls)] for i in range(max(launches, len(calls)))]


def dense_timer(machine: Machine, sizes: Sizes, n: int, k: int, tokens: int) -> Timer:
    """Return a timer of bf16 cuBLAS on rotated weights."""
    count = max(2, -(-sizes.rotated_bytes // (2 * n * k)))
    weights = torch.randn(count, n, k, dtype=torch.bfloat16, device=machine.device)
    x = torch.randn(tokens, k, dtype=torch.bfloat16, device=machine.device)
    return machine.timer(cycle([partial(F.linear, x, weight) for weight in weights], sizes.launches))


def check_product(
    launcher: TernaryLauncher, matrix: TernaryMatrix, weight: PackedTernary, tokens: int, shape: LinearShape
) -> None:
    """Compare one build with exact sums; raises SystemExit with both if they differ."""
    n, k = matrix.shape
    q, inverse = random_tokens(tokens, k, matrix.codes.device)
    got = launcher.linear(q, inverse, weight, torch.bfloat16, shape)
    sums = (q.double() @ matrix.codes.double().T).float()
    want = (sums * (matrix.scales / inverse[:, None])).bfloat16()
    if not torch.equal(got, want):
        raise SystemExit(f"{shape} of {n} x {k} is wrong: {got.float()} instead of {want.float()}")


def variant_name(shape: LinearShape) -> str:
    if isinstance(shape, ProductShape):
        return f"{shape.warps} warps, {shape.split} a strip, {shape.stages} stages"
    if isinstance(shape, WgmmaShape):
        return f"{shape.rows} x {shape.tokens}, {shape.warpgroups} warpgroups, {shape.stages} stages"
    return f"{shape.strips * 16} x {shape.tokens}, {shape.row_warps} x {shape.token_warps} warps, {shape.stages} stages"


def builds(
    sizes: Sizes, launcher: TernaryLauncher, weight: PackedTernary, tokens: int, every: bool
) -> list[LinearShape]:
    """Return the operator's choice, and with `every` what else is worth trying."""
    chosen = launcher.choose(weight, tokens, torch.bfloat16)
    if not every:
        return [chosen]
    if not isinstance(chosen, ProductShape):
        others: list[LinearShape] = [replace(shape, bf16=True) for shape in sizes.prefill]
        return list(dict.fromkeys([chosen, *(wgmma_shapes(bf16=True) if launcher.wgmma else ()), *others]))
    strips, strip_bytes = weight.codes.shape
    units = -(-strip_bytes // UNIT_BYTES)
    return list(dict.fromkeys([chosen, *variants(weight.LAYOUT, strips, units, tokens, bf16=True)]))


def matrix_rows(
    machine: Machine, sizes: Sizes, launcher: TernaryLauncher, n: int, k: int, tokens: int, every: bool
) -> Iterator[dict[str, Any]]:
    """Time a matrix in both layouts, in all builds asked for, beside cuBLAS."""
    matrix = random_matrix(n, k, machine.device)
    kind = "gemv" if tokens <= max(sizes.batches) else "prefill"
    layouts: list[type[PackedTernary]] = [TensorCoreTiles, Blocks16x32] if kind == "gemv" else [TensorCoreTiles]
    named, timers = [], [dense_timer(machine, sizes, n, k, tokens)]
    q, inverse = random_tokens(tokens, k, machine.device)
    for layout in layouts:
        weight = layout.pack(matrix)
        copies = rotated(weight, sizes)
        for i, shape in enumerate(builds(sizes, launcher, weight, tokens, every)):
            check_product(launcher, matrix, weight, tokens, shape)
            calls = [partial(launcher.linear, q, inverse, copy, torch.bfloat16, shape) for copy in copies]
            named.append((weight, shape, i == 0))
            timers.append(machine.timer(cycle(calls, sizes.launches)))
    reference_us, *found = taking_turns(timers, sizes.repeats)
    for (weight, shape, chosen), us in zip(named, found, strict=True):
        yield {
            "kind": kind,
            "layout": weight.LAYOUT,
            "shape": f"{n}x{k}",
            "batch": tokens,
            "variant": variant_name(shape),
            "chosen": chosen,
            "us": us,
            "reference": "bf16 cuBLAS",
            "reference_us": reference_us,
            "speedup": reference_us["median"] / us["median"],
            "gpu_mb": weight.nbytes / 1e6,
            "reference_gpu_mb": 2 * n * k / 1e6,
        }


def attend(model: ModelShape, qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention over one prompt, (tokens, heads * head_dim)."""
    q, k, v = (
        part.view(len(qkv), -1, model.head_dim).transpose(0, 1)[None]
        for part in qkv.split([h * model.head_dim for h in (model.heads, model.kv_heads, model.kv_heads)], 1)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(qkv), -1)


Layers = Sequence[Sequence[Any]]
"""Matrices qkv, out, gate and up, down of each layer; of either kind."""


def dense_prefill(model: ModelShape, layers: Layers, norms: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The published model's layers in bf16, without rotary embedding: norm, product, sub-norm, squared ReLU.

    Returns the residual before the last layer, of which only keys and values are made, as in the engine's prefill.
    """

    def normed(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[1],), norms[x.shape[1] == model.inner], 1e-5)

    for qkv, out, gate_up, down in layers[:-1]:
        x = x + F.linear(normed(attend(model, F.linear(normed(x), qkv))), out)
        gate, up = F.linear(normed(x), gate_up).chunk(2, 1)
        x = x + F.linear(normed(F.relu(gate).square() * up), down)
    F.linear(normed(x), layers[-1][0][model.heads * model.head_dim :])
    return x


def packed_model(model: ModelShape, matrices: Layers, embedding: torch.Tensor, context: int) -> PackedModel:
    """Return the same layers packed, with norms of ones and rotations by nothing, as the reference has them."""
    config, device = model.config(len(matrices)), embedding.device
    packed = allocate(config, weight_layout(config, TileRows(), context_tokens=context), device)
    hidden, inner, q = (torch.ones(n, device=device) for n in (model.hidden, model.inner, config.q_size))
    for index, layer in enumerate(matrices):
        qkv, out, gate_up, down = map(TernaryReference, layer)
        weights = LayerWeights(hidden, qkv, None, None, None, out, None, hidden, gate_up, None, down, None, q, inner)
        pack_layer(packed, index, weights)
    pack_embedding(packed, embedding)
    packed.write_rope(torch.tensor([1.0, 0.0]).view(2, 1, 1).expand(2, context, model.head_dim // 2))
    return packed


def engine_prefill(machine: Machine, packed: PackedModel, tokens: int) -> TernaryPrefill:
    """Return the engine's prefill of a packed model."""
    cache = KVCache.allocate(packed.config, -(-tokens // PAGE_TOKENS), torch.bfloat16, str(machine.device))
    return TernaryPrefill(packed, cache, machine.load, sms=machine.sms, wgmma=machine.wgmma)


def model_row(machine: Machine, sizes: Sizes) -> dict[str, Any]:
    """Time the prefill of a whole prompt."""
    model, device, tokens = sizes.model, machine.device, sizes.prompt
    matrices = [[random_matrix(n, k, device) for n, k in model.matrices] for _ in range(model.layers)]
    ids = torch.randint(0, 512, (tokens,)).tolist()
    embedding = torch.randn(512, model.hidden, device=device, dtype=torch.bfloat16)
    x, table = embedding[ids], torch.arange(-(-tokens // PAGE_TOKENS), device=device, dtype=torch.int32)
    prefill = engine_prefill(machine, packed_model(model, matrices, embedding, tokens), tokens)
    of_one = engine_prefill(machine, packed_model(model, matrices[:1] * 2, embedding, tokens), tokens)
    dense = [[matrix.dequantised().bfloat16() for matrix in layer] for layer in matrices]
    del matrices
    norms = [torch.ones(width, device=device, dtype=torch.bfloat16) for width in (model.hidden, model.inner)]
    of_one.run(ids, table, 0)
    got = of_one.activations.residual[:tokens] - x.float()
    want = dense_prefill(model, dense[:1] * 2, norms, x).float() - x.float()
    error = float((got - want).norm() / want.norm())
    if not error < 0.1:  # of one layer: int8 activations are a few per cent away, a wrong layout is anywhere
        raise SystemExit(f"prefill of {model.name}: relative difference {error} from bf16")
    del of_one
    theirs = partial(dense_prefill, model, dense, norms, x)
    timers = [
        machine.eager_timer([partial(prefill.run, ids, table, 0)]),
        machine.timer([partial(prefill.launch, tokens, 0)]),
        machine.eager_timer([theirs]),
        machine.timer([theirs]),
    ]
    us, graph_us, reference_us, reference_graph_us = taking_turns(timers, sizes.repeats)
    return {
        "kind": "prefill",
        "layout": "tensor_core",
        "model": model.name,
        "batch": tokens,
        "us": us,
        "graph_us": graph_us,
        "reference": "eager PyTorch, bf16, SDPA",
        "reference_us": reference_us,
        "reference_graph_us": reference_graph_us,
        "speedup": reference_us["median"] / us["median"],
        "relative_difference_of_one_layer": error,
        "gpu_mb": sum(n * k for n, k in model.matrices) * model.layers / 4e6,
        "reference_gpu_mb": sum(weight.nbytes for layer in dense for weight in layer) / 1e6,
    }


def what(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row measures, in all its variants."""
    return row["kind"], row.get("shape"), row.get("model"), row.get("batch")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shim", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--seconds", type=float, default=220, help="start nothing new after this long (default: 220)")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/ternary.json"))
    options = parser.parse_args(arguments)
    begun, rows = time.monotonic(), rows_of_kinds(options.out, ("gemv", "prefill", "decode", "memory"))
    machine, sizes = (on_shim(), SHIM) if options.shim else (on_gpu(), GPU)
    launcher = TernaryLauncher(machine.load, machine.sms, machine.wgmma)
    torch.manual_seed(0)
    gbps = read_gbps(machine, 8 * sizes.rotated_bytes, sizes.repeats)
    print(f"plain read: {gbps:.0f} GB/s", flush=True)

    def left() -> bool:
        return time.monotonic() - begun < options.seconds

    def keep(found: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
        fresh = list(found)
        measured = {what(row) for row in fresh}
        rows[:] = [row for row in rows if what(row) not in measured]
        for row in fresh:
            row["floor_us"] = 1e3 * row["gpu_mb"] / gbps
            rows.append(row)
            name = f"{row.get('shape', row.get('model'))} batch {row['batch']} {row['layout']} {row.get('variant', '')}"
            print(
                f"{time.monotonic() - begun:6.1f} s  {'*' if row.get('chosen') else ' '} {name}: "
                f"{row['us']['median']:.2f} us, floor {row['floor_us']:.2f}, "
                f"reference {row['reference_us']['median']:.2f}",
                flush=True,
            )
        write_results(options.out, rows, commit=options.commit, read_gbps=round(gbps, 1), **machine.about)

    if left():
        keep([model_row(machine, sizes)])
    first, *others = sizes.batches
    for n, k in sizes.shapes:
        if left():
            keep(matrix_rows(machine, sizes, launcher, n, k, first, every=True))
    for n, k in sizes.model.matrices:
        if left():
            keep(matrix_rows(machine, sizes, launcher, n, k, sizes.prompt, every=True))
    for tokens in reversed(others):
        for n, k in sizes.shapes:
            if left():
                keep(matrix_rows(machine, sizes, launcher, n, k, tokens, every=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
