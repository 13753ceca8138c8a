"""Which settings of the megakernel are fastest on this GPU for a model: nothing is kept, the table is for reading.

    python benchmarks/tune.py --model Llama-3.2-1B --prompt 64 --new 128 --windows 2,3,12 3,3,12 2,4,8

Random weights. Times whole launches on the device, without engine and prefill; the cache holds zeros. A setting is a
partition, the pages of a block of the cache, and windows: the fields of engine/megakernel.py's Windows in their order,
of which the last ones may be left out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import astuple

import torch
from decode import DeviceDummy, read_roofline

from onekernel.device.cuda_kernel import load_kernel
from onekernel.device.facts import facts
from onekernel.device.support import architecture
from onekernel.engine.kv_size import with_pages
from onekernel.engine.megakernel import Megakernel, Windows
from onekernel.engine.megakernel_load import plan_megakernel
from onekernel.engine.memory import pages_for
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.models.load import load_packed
from onekernel.models.packed import PackedModel
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.plan.partition import Strategy
from onekernel.plan.plan import Plan, make_plan
from onekernel.weights.open import open_checkpoint

STRATEGIES: tuple[Strategy, ...] = ("balanced", "level")


def windows_of(text: str) -> Windows:
    """Parse "short,long,long_phase,deep,deep_phase,deep_from,lead,pace"; what is left out has its default."""
    return Windows(*(int(part) for part in text.split(",")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--windows", type=windows_of, nargs="+", metavar="S,L,N,...", help="default: the plan's")
    parser.add_argument("--block-pages", type=int, nargs="+", help="default: the engine's")
    parser.add_argument("--partition", choices=STRATEGIES, nargs="+", default=["balanced"])
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def launch_us(megakernel: Megakernel, windows: Windows, prompt: int, new: int, block_pages: int | None = None) -> float:
    """Return microseconds per token of one launch, by events around it."""
    table = torch.arange(megakernel.plan.limits.table_pages, dtype=torch.int32, device=megakernel.device)[None]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    megakernel.launch([1], [prompt - 1], table, new, windows=windows, block_pages=block_pages)
    end.record()
    end.synchronize()
    megakernel.check()
    return float(begin.elapsed_time(end)) * 1e3 / new


def megakernels(base: Plan, packed: PackedModel, strategies: list[Strategy]) -> Iterator[tuple[str, Megakernel]]:
    """Yield a kernel for each plan on the same weights and cubin."""
    device = str(packed.arena.device)
    limits = base.limits
    shape = MegakernelShape.of(
        base.config,
        sequences=1,
        warps=limits.consumer_warps,
        stages=base.shared.stages,
        sparse=base.layout.sparse,
    )
    kernel = load_kernel(shape.spec(architecture(facts(device))), device)
    cache = KVCache.allocate(base.config, limits.num_pages, torch.bfloat16, device)
    for strategy in strategies:
        plan = make_plan(base.config, limits, partition=strategy, active_fraction=base.active_fraction)
        if plan.layout != base.layout or plan.shared.stages < shape.stages:
            print(f"{strategy}: another layout of weights or shared memory; left out")
            continue
        yield strategy, Megakernel(plan, packed, cache, kernel, shape)


def main() -> None:
    args = arguments()
    checkpoint = open_checkpoint(args.model, load_format="dummy")
    config = model_config(checkpoint.settings.config)
    context = args.prompt + args.new
    planned = plan_megakernel(config, args.device, torch.bfloat16, context, config.vocab_size)
    if planned.plan is None:
        raise SystemExit(f"not the megakernel: {planned.reason}")
    base = with_pages(planned.plan, pages_for(context))
    packed = load_packed(
        DeviceDummy(checkpoint, args.device), config, base.layout, device=args.device, progress=lambda done, total: None
    )
    roofline = read_roofline(packed.arena, args.device)
    kv_bytes = config.kv_bytes_per_token() * (args.prompt + args.new // 2)
    floor_us = (base.bytes_per_token + kv_bytes) / roofline.gbps / 1e3
    print(f"{args.model}: {floor_us:.0f} us at {roofline.gbps:.0f} GB/s, {len(base.phases)} phases", flush=True)
    for name, megakernel in megakernels(base, packed, args.partition):
        blocks = args.block_pages or [megakernel.plan.block_pages_after(args.prompt)]
        for pages, windows in itertools.product(blocks, args.windows or [Windows.of(megakernel.plan)]):
            samples = sorted(
                launch_us(megakernel, windows, args.prompt, args.new, pages) for _ in range(args.repeats + 1)
            )
            median = samples[args.repeats // 2]
            setting = "windows " + ",".join(str(value) for value in astuple(windows))
            print(f"{name} block {pages} {setting}: {median:.1f} us, {100 * floor_us / median:.1f} %", flush=True)


if __name__ == "__main__":
    main()
