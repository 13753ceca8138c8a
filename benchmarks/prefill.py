"""Prefill by the kernels that read the packed weights, beside PyTorch on unpacked ones: results/prefill.json.

    python benchmarks/prefill.py --commit $(git rev-parse HEAD)     Llama-3.2-1B on a GPU, under three minutes
    python benchmarks/prefill.py --shim --out /tmp/x.json           the same code on the CPU, tiny: shows that it runs

Random weights, made on the device. Rows by `kind`:
- machine: the plain read of the layers' weights and a large bf16 product by PyTorch, the two floors, in the same run.
- product: one matrix in one variant, timed over all layers in turn, so that its weights come from memory.
- fit: what a CTA of a variant needs for 64 columns of K, from the product rows: what kernels/prefill/variants.py calls
  `ns_per_unit`.
- prefill: a whole prompt, by PyTorch ("torch"), by the variants that variants.py chooses ("packed") and by those that
  the fit would choose ("packed, fitted"): host time until the device is done, and until the first token is here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onekernel.config import ModelConfig, Sampling
from onekernel.device.kernel import BindableKernel
from onekernel.device.shim import ShimKernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.packed_prefill import PackedPrefill
from onekernel.engine.request import CancelToken
from onekernel.kernels.prefill.variants import VARIANTS, Variant, rounds
from onekernel.measure.results import spread, write_results
from onekernel.models.load import load_packed
from onekernel.models.model import Model, Place
from onekernel.models.packed import PackedModel
from onekernel.models.packed_weights import PackedWeights
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.weights.arena import LAYER_MATRICES, TileRows, weight_layout
from onekernel.weights.open import open_checkpoint

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@dataclass(slots=True)
class Rig:
    """A packed model on a machine. `backend` answers there with the megakernel; None on the shim."""

    name: str
    config: ModelConfig
    packed: PackedModel
    cache: KVCache
    sms: int
    variants: tuple[Variant, ...]
    load: Callable[[KernelSpec], BindableKernel]
    backend: Callable[[PackedPrefill | None], MegakernelBackend] | None
    facts: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return self.packed.arena.device

    def kernels(self, variants: tuple[Variant, ...]) -> PackedPrefill:
        return PackedPrefill(self.packed, self.cache, self.load, sms=self.sms, variants=variants)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def ms(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Time `work` until the device is done, after one run that does not count."""
        samples = []
        for _ in range(repeats + 1):
            self.wait()
            begun = time.perf_counter()
            work()
            self.wait()
            samples.append((time.perf_counter() - begun) * 1e3)
        return samples[1:]


def gpu_rig(model: str, device: str, context: int) -> Rig:
    from decode import DeviceDummy

    from onekernel.device.cuda_kernel import load_kernel
    from onekernel.device.facts import facts
    from onekernel.engine.megakernel_load import assemble, plan_megakernel
    from onekernel.engine.memory import plan_memory

    dummy = open_checkpoint(model, load_format="dummy")
    config, found = model_config(dummy.settings.config), facts(device)
    planned = plan_megakernel(config, device, torch.bfloat16, context, config.vocab_size)
    if planned.plan is None:
        raise SystemExit(f"no plan for {model}: {planned.reason}")
    plan, quiet = planned.plan, lambda done, total: None
    packed = load_packed(DeviceDummy(dummy, device), config, plan.layout, device=device, progress=quiet)
    megakernel = assemble(plan, packed, device, print)
    memory = plan_memory(config, torch.bfloat16, device, context, plan)
    return Rig(
        dummy.settings.name,
        config,
        packed,
        megakernel.cache,
        found.sm_count,
        VARIANTS,
        lambda spec: load_kernel(spec, device),
        lambda prefill: MegakernelBackend(megakernel, memory=memory, prefill=prefill),
        {"device": found.name, "driver": found.driver_version},
    )


def shim_rig() -> Rig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(TINY))
        dummy = open_checkpoint(str(path), load_format="dummy")
    config = model_config(dummy.settings.config)
    layout = weight_layout(config, TileRows(), context_tokens=64)
    packed = load_packed(dummy, config, layout, device="cpu", progress=lambda done, total: None)
    cache = KVCache.allocate(config, 2, torch.bfloat16, "cpu")
    return Rig("tiny", config, packed, cache, 4, VARIANTS[:2], ShimKernel, None, {"device": "shim", "driver": ""})


def machine_row(rig: Rig, repeats: int) -> dict[str, Any]:
    """Return what the device reads and multiplies in a second."""
    layout = rig.packed.layout
    bytes_read = sum(layout.matrices[kind, 0].total_bytes for kind in LAYER_MATRICES) * rig.config.num_hidden_layers
    size = 8192 if rig.device.type == "cuda" else 64
    a, b = torch.randn(2, size, size, device=rig.device).bfloat16()
    matmul_ms = statistics.median(rig.ms(lambda: a @ b, repeats))
    if rig.device.type == "cuda":
        from decode import read_roofline

        read_ms = read_roofline(rig.packed.arena[: bytes_read // 16 * 16], str(rig.device)).us["median"] / 1e3
    else:
        read_ms = statistics.median(rig.ms(lambda: rig.packed.arena[:bytes_read].sum(), repeats))
    return {
        "kind": "machine",
        "model": rig.name,
        "layer_bytes": bytes_read,
        "read_gbps": bytes_read / read_ms / 1e6,
        "matmul_tflops": 2 * size**3 / matmul_ms / 1e9,
    }


def floor_ms(machine: dict[str, Any], bytes_read: float, products: float) -> float:
    """Return the longer of reading the weights and making the products, `products` in multiplications with a sum."""
    return max(bytes_read / machine["read_gbps"] / 1e6, 2 * products / machine["matmul_tflops"] / 1e9)


def product_rows(rig: Rig, machine: dict[str, Any], sizes: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    layers = rig.config.num_hidden_layers
    for variant in rig.variants:
        prefill = rig.kernels((variant,))
        for values in (prefill.activations.normed, prefill.activations.mixed, prefill.activations.inner):
            values.normal_()
        for tokens in sizes:
            for kind in LAYER_MATRICES:
                place = rig.packed.layout.matrices[kind, 0]

                def all_layers(prefill=prefill, kind=kind, tokens=tokens, variant=variant) -> None:  # type: ignore[no-untyped-def]
                    for layer in prefill.layers:
                        layer.product(kind, tokens, variant)

                us = [ms * 1e3 / layers for ms in rig.ms(all_layers, repeats)]
                products = tokens * place.padded_rows * place.padded_columns
                median = statistics.median(us)
                yield {
                    "kind": "product",
                    "model": rig.name,
                    "matrix": kind,
                    "tokens": tokens,
                    "variant": variant.name,
                    "us": spread(us),
                    "tflops": 2 * products / median / 1e6,
                    "read_gbps": place.total_bytes / median / 1e3,
                    "floor_us": floor_ms(machine, place.total_bytes, products) * 1e3,
                    "rounds": rounds(variant, tokens, place.padded_rows, rig.sms),
                    "units": place.padded_columns // 64,
                }


def fit_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each variant's `ns_per_unit`, the median over products of at least half a round of CTAs."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["rounds"] >= 0.5:
            found[row["variant"]].append(row["us"]["median"] * 1e3 / row["rounds"] / row["units"])
    return [
        {"kind": "fit", "variant": variant, "ns_per_unit": spread(sorted(values))} for variant, values in found.items()
    ]


def prefill_rows(
    rig: Rig, machine: dict[str, Any], sizes: list[int], fitted: tuple[Variant, ...], repeats: int
) -> Iterator[dict[str, Any]]:
    ways: dict[str, PackedPrefill | None] = {
        "torch": None,
        "packed": rig.kernels(rig.variants),
        "packed, fitted": rig.kernels(fitted),
    }
    model, pages = Model(rig.config, PackedWeights(rig.packed)), torch.arange(rig.cache.num_pages)
    matrices = sum(
        place.padded_rows * place.padded_columns
        for (kind, _), place in rig.packed.layout.matrices.items()
        if kind != "head"
    )
    torch_ms = 0.0
    for tokens in sizes:
        ids = torch.randint(rig.config.vocab_size, (tokens + 1,)).tolist()
        attention = rig.config.num_hidden_layers * rig.config.q_size * tokens * tokens  # two products, half of each
        products = tokens * matrices + attention
        for way, prefill in ways.items():

            def run(prefill: PackedPrefill | None = prefill, ids: list[int] = ids, tokens: int = tokens) -> None:
                step = 512 if prefill is None else prefill.chunk_tokens
                for start in range(0, tokens, step):
                    chunk = ids[start : min(start + step, tokens)]
                    if prefill is None:
                        model.extend(chunk, Place(rig.cache, pages, rig.packed.rope, start))
                    else:
                        prefill.run(chunk, pages, start)

            ms = rig.ms(run, repeats)
            if prefill is None:
                torch_ms = statistics.median(ms)
            yield {
                "kind": "prefill",
                "model": rig.name,
                "tokens": tokens,
                "variant": way,
                "prefill_ms": spread(ms),
                "torch_ms": torch_ms,
                "floor_ms": floor_ms(machine, machine["layer_bytes"], products),
                "tflops": 2 * products / statistics.median(ms) / 1e9,
                "ttft_ms": first_token_ms(rig, prefill, ids, repeats),
            }


def first_token_ms(rig: Rig, prefill: PackedPrefill | None, ids: list[int], repeats: int) -> dict[str, float] | None:
    """Time from the request's pages to its first token on the host; the rest of its launch is not waited for."""
    if rig.backend is None:
        return None
    backend, samples = rig.backend(prefill), []
    for _ in range(repeats + 1):
        rig.wait()
        begun = time.perf_counter()
        sequence = backend.open(ids, len(ids) + 2)
        backend.prefill(sequence, CancelToken(), lambda done, total: None)
        answer = backend.decode(sequence, Sampling(), 2, frozenset(), CancelToken())
        next(answer)
        samples.append((time.perf_counter() - begun) * 1e3)
        answer.close()
        backend.release(sequence)
    return spread(samples[1:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.2-1B", help="a shipped configuration or a config.json")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16, 64, 512, 2048], metavar="N", help="prompts' sizes"
    )
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shim", action="store_true", help="run on the CPU, tiny")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/prefill.json"))
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    sizes, repeats = ([5, 17], 2) if args.shim else (args.tokens, args.repeats)
    rig = shim_rig() if args.shim else gpu_rig(args.model, args.device, max(sizes) + 128)
    machine = machine_row(rig, repeats)
    rows: list[dict[str, Any]] = [machine]

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_results(args.out, rows, commit=args.commit, read_gbps=round(machine["read_gbps"], 1), **rig.facts)

    print(json.dumps(machine), flush=True)
    products = []
    for row in product_rows(rig, machine, sizes, repeats):
        products.append(row)
        keep(row)
    fits = fit_rows(products)
    for row in fits:
        keep(row)
    ns = {row["variant"]: row["ns_per_unit"]["median"] for row in fits}
    fitted = tuple(replace(v, ns_per_unit=ns.get(v.name, v.ns_per_unit)) for v in rig.variants)
    for row in prefill_rows(rig, machine, sizes, fitted, repeats):
        keep(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
