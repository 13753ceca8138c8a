"""Decode with the megakernel, through the engine, beside what else reads the same weights: results/decode.json.

    python benchmarks/decode.py --model Llama-3.2-1B --prompt 64 --new 128 --baselines

Random weights, made on the device. `us_per_token` is (host time of the last token - of the first) / (tokens - 1) of one
answer, over `--repeats` answers, all sides taking turns. `read_roofline_us` is the time of reading `bytes_per_token`
(weights, and the cache at its mean length) at the rate that a plain read of these weights reached in the same run. Rows
of another model, length or backend that the file already holds stay; it is written after every round. `--phases` adds
`phases`: how many of each kind, what they take in a traced build (slower), and how long their bytes take to read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_baselines import Timing, plain_decoder, transformers_static

from onekernel import SamplingParams
from onekernel.config import ModelConfig
from onekernel.device.facts import facts
from onekernel.engine.engine import Engine
from onekernel.engine.kv_size import with_pages
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.megakernel_load import assemble, plan_megakernel, prefill_kernels, warm_up
from onekernel.engine.memory import pages_for, plan_memory
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.engine.stream import AnswerStream
from onekernel.engine.ternary import place_on, place_packed_on
from onekernel.measure.bench import random_ids
from onekernel.measure.results import git_commit, spread, write_results
from onekernel.measure.timeline import summarize
from onekernel.measure.trace import trace_token
from onekernel.models.load import load_packed, load_weights
from onekernel.models.model import Model
from onekernel.models.registry import model_config
from onekernel.models.ternary import load_packed_ternary, load_ternary
from onekernel.plan.abi import Kind
from onekernel.text.tokenizer import Tokenizer
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.open import open_checkpoint

Run = Callable[[], Timing]
"""Answers once."""


@dataclass(slots=True)
class Side:
    """One way to compute the answer, and the times of its answers so far."""

    backend: str
    run: Run
    note: str | None = None
    timings: list[Timing] = field(default_factory=list)
    phases: dict[str, dict[str, float]] | None = None


class DeviceDummy:
    """A dummy checkpoint whose tensors are made on the device: their values are others, their sizes the same.

    A tensor has the same values whenever it is read: ternary models are read once more, to check how they multiply.
    """

    def __init__(self, dummy: Checkpoint, device: str) -> None:
        self.settings, self.tensors, self._device = dummy.settings, dummy.tensors, device

    def read(self, name: str) -> torch.Tensor:
        shape = self.tensors[name].shape
        draw = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=draw)
        return tensor.mul_(shape[-1] ** -0.5) if len(shape) > 1 else tensor.mul_(0.1).add_(1)

    def close(self) -> None:
        pass


def our_engine(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: str,
    context: int,
    *,
    contexts: int = 1,
    prefix_cache: bool = False,
) -> Engine:
    """Return an engine on the megakernel, or where that is not possible on the reference; with pages for `contexts`."""
    pages = contexts * pages_for(context)
    planned = plan_megakernel(config, device, torch.bfloat16, context, config.vocab_size)
    memory = plan_memory(config, torch.bfloat16, device, context, planned.plan, pages)
    quiet: Callable[[int, int], None] = lambda done, total: None  # noqa: E731
    backend: MegakernelBackend | ReferenceBackend
    if planned.plan is not None:
        plan = with_pages(planned.plan, pages)
        if config.ternary is None:
            packed = load_packed(checkpoint, config, plan.layout, device=device, progress=quiet)
        else:
            place = place_packed_on(device)
            packed = load_packed_ternary(checkpoint, config, plan.layout, device=device, progress=quiet, place=place)
        megakernel = assemble(plan, packed, device, print)
        prefill = prefill_kernels(megakernel, device)
        backend = MegakernelBackend(megakernel, memory=memory, prefix_cache=prefix_cache, prefill=prefill)
        warm_up(backend)
    else:
        print(f"the reference, because {planned.reason}", flush=True)
        load = load_weights if config.ternary is None else partial(load_ternary, place=place_on(device))
        weights = load(checkpoint, config, dtype=torch.bfloat16, device=device, progress=quiet)
        backend = ReferenceBackend(
            Model(config, weights),
            max_context=context,
            num_pages=pages,
            vocab_limit=config.vocab_size,
            memory=memory,
            prefix_cache=prefix_cache,
        )
    return Engine(backend, Tokenizer.placeholder(config.vocab_size), {})


def our_answer(engine: Engine, ids: tuple[int, ...], new: int) -> Timing:
    params = SamplingParams(max_tokens=new, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    timings = AnswerStream(lambda deliver: engine.submit(ids, params, deliver)).result().timings
    return Timing(timings.decode_ms * 1e3 / (timings.decode_tokens - 1), timings.ttft_ms)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A plain read of the weights that a token reads."""

    read_bytes: int
    us: dict[str, float]
    sm_clock_mhz: int

    @property
    def gbps(self) -> float:
        return self.read_bytes / self.us["median"] / 1e3


def read_roofline(weights: torch.Tensor, device: str, repeats: int = 11) -> Roofline:
    """Time reading all of `weights`, bytes on a GPU, with the best of five grids."""
    from onekernel.device.cuda_kernel import load_kernel
    from onekernel.kernels.machine import READ_ALL, READ_THREADS

    kernel, data = load_kernel(READ_ALL, device), weights.view(torch.int32).view(-1, 4)
    sms, found = facts(device).sm_count, []
    for ctas in (sms * per_sm for per_sm in (1, 2, 4, 8, 16)):
        sums = torch.zeros(ctas * READ_THREADS, dtype=torch.int32, device=device)
        times = torch.zeros(ctas, 2, dtype=torch.int64, device=device)
        samples = []
        for _ in range(repeats + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            kernel.launch(ctas, READ_THREADS, [data, len(data), sums, times])
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        mhz = statistics.median(1e3 * cycles / max(ns, 1) for cycles, ns in times.tolist())
        found.append(Roofline(data.nbytes, spread(samples[1:]), round(mhz)))
    return min(found, key=lambda roofline: roofline.us["median"])


def phases_of(backend: MegakernelBackend, prompt: int, token: int, gbps: float) -> dict[str, dict[str, float]]:
    """Return where the time of an answer's token goes, by kind of phase, beside what its bytes take at `gbps`."""
    config = backend.megakernel.plan.config
    found = {}
    for part in summarize(trace_token(backend, random_ids(prompt, config.vocab_size), token)):
        read = part.megabytes * 1e6
        if part.kind == Kind.ATTENTION.name.lower():
            read += (prompt + token) * config.kv_bytes_per_token()
        floor_us = read / gbps / 1e3
        found[part.kind] = {"count": part.phases, "us": round(part.total_us, 2), "floor_us": round(floor_us, 2)}
    return found


def rows_of(sides: list[Side], about: Mapping[str, Any], roofline_us: float | None) -> list[dict[str, Any]]:
    rows = []
    for side in sides:
        if not side.timings:
            continue
        us = spread([timing.us_per_token for timing in side.timings])
        rows.append(
            {
                "backend": side.backend,
                **about,
                "us_per_token": us,
                "ttft_ms": spread([timing.ttft_ms for timing in side.timings]),
                "percent_of_roofline": roofline_us and round(100 * roofline_us / us["median"], 1),
                **({"note": side.note} if side.note else {}),
                **({"phases": side.phases} if side.phases else {}),
            }
        )
    return rows


def kept_rows(path: Path, about: Mapping[str, Any], sides: list[Side]) -> list[dict[str, Any]]:
    """Return the file's rows that this run does not measure anew."""
    if not path.exists():
        return []
    names = {side.backend for side in sides}
    same = ("model", "prompt_tokens", "new_tokens")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["backend"] not in names or any(row[key] != about[key] for key in same)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.2-1B", help="a shipped configuration or a config.json")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="generated tokens, at least 2")
    parser.add_argument("--context", type=int, metavar="N", help="context to allocate (default: prompt + new)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="answers of each side")
    parser.add_argument("--baselines", action="store_true", help="also transformers and a plain compiled decoder")
    parser.add_argument("--phases", action="store_true", help="also where the time of a token goes, by a traced build")
    parser.add_argument("--untuned", action="store_true", help="compile the plain decoder without tuning its kernels")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/decode.json"))
    args = parser.parse_args()
    begun, commit = time.monotonic(), args.commit or git_commit()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    torch.manual_seed(0)
    dummy = open_checkpoint(args.model, load_format="dummy")
    config = model_config(dummy.settings.config)
    total = args.prompt + args.new
    engine = our_engine(DeviceDummy(dummy, args.device), config, args.device, args.context or total)
    backend = engine.backend
    say(f"{dummy.settings.name} on {backend.name}")
    ids = random_ids(args.prompt, config.vocab_size)
    sides = [Side(backend.name, partial(our_answer, engine, ids, args.new))]

    weight_bytes = 2 * config.parameters_read_per_token
    roofline, machine = None, {"device": "CPU"}
    if isinstance(backend, MegakernelBackend):
        plan = backend.megakernel.plan
        weight_bytes = plan.bytes_per_token
        arena = backend.megakernel.packed.arena
        roofline = read_roofline(arena[: weight_bytes // 16 * 16], args.device)
        say(
            f"plain read of {roofline.read_bytes / 1e9:.3f} GB: {roofline.us['median']:.1f} us, "
            f"{roofline.gbps:.0f} GB/s"
        )
        if args.phases:
            sides[0].phases = phases_of(backend, args.prompt, min(8, args.new - 2), roofline.gbps)
        found = facts(args.device)
        machine = {"device": found.name, "driver": found.driver_version, "sm_clock_mhz": roofline.sm_clock_mhz}
    mean_length = args.prompt + (args.new - 1) // 2
    bytes_per_token = weight_bytes + mean_length * config.kv_bytes_per_token()
    roofline_us = bytes_per_token / roofline.gbps / 1e3 if roofline else None
    about = {
        "model": dummy.settings.name,
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "context_tokens": total,
        "bytes_per_token": bytes_per_token,
        "read_gbps": roofline and round(roofline.gbps, 1),
        "read_roofline_us": roofline_us and round(roofline_us, 1),
        "commit": commit,
    }

    def one_round() -> None:
        for side in sides:
            side.timings.append(side.run())
        rows = rows_of(sides, about, roofline_us)
        write_results(args.out, [*kept_rows(args.out, about, sides), *rows], commit=commit, **machine)

    def tell() -> None:
        for row in rows_of(sides, about, roofline_us):
            us = row["us_per_token"]
            say(
                f"{row['backend']}: {us['median']:.1f} us per token ({us['p10']:.1f} to {us['p90']:.1f}), "
                f"{row['percent_of_roofline']} % of the roofline, first token after {row['ttft_ms']['median']:.1f} ms"
            )

    sides[0].run()
    for _ in range(args.repeats):
        one_round()
    tell()
    if args.baselines:
        for side in (
            Side("transformers static cache", transformers_static(dummy.settings.config, ids, args.new, args.device)),
            Side(
                "torch.compile and CUDA graph",
                plain_decoder(config, ids, args.new, args.device, tuned=not args.untuned),
                note="gpt-fast style" + ("" if args.untuned else ", coordinate descent tuning"),
            ),
        ):
            for _ in range(3):
                side.run()  # compiles, then records the graph
            say(f"{side.backend} is ready")
            sides.append(side)
            for _ in range(args.repeats):
                one_round()
            tell()
    engine.close()


if __name__ == "__main__":
    main()
