"""Ternary models in the megakernel, through the engine: rows of the kinds decode and memory of results/ternary.json.

    python benchmarks/ternary_decode.py --commit $(git rev-parse HEAD) --energy     on a GPU, some five minutes
    python benchmarks/ternary_decode.py --tiny --out /tmp/x.json                    tiny models on the CPU's reference

Random weights in the published shapes: 2B-4T with a bf16 and with an int8 head, a dense bf16 Llama of its dimensions in
the same run, and Qwen3-1.7B's shape with a scale for each 128 columns. All sides take turns at each length.
`us_per_token` is (host time of the last token - of the first) / (tokens - 1); `floor_us` the time of reading
`bytes_per_token` at the rate of a plain read in the same run; `speedup` is over the dense model at the same length.
`phases_us` come from a traced build, which is slower. memory: 2B-4T read as the engine reads it, context 4,096.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode import DeviceDummy, Roofline, our_answer, our_engine, read_roofline
from energy import counter_if_any, millijoules_per_call

from onekernel.config import ModelConfig
from onekernel.device.facts import facts
from onekernel.engine.engine import Engine
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.errors import OnekernelError
from onekernel.measure.bench import random_ids
from onekernel.measure.results import rows_of_kinds, spread, write_results
from onekernel.measure.timeline import summarize
from onekernel.measure.trace import trace_token
from onekernel.models.registry import model_config
from onekernel.models.sizes import bytes_read_per_token
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.open import open_checkpoint
from onekernel.weights.shipped import read_shipped

Settings = dict[str, Any]

BITNET, QWEN = "bitnet-b1.58-2B-4T", "Ternary-Qwen3-1.7B"
DENSE = f"dense Llama of {BITNET}'s dimensions"
LENGTHS = ((64, 64), (512, 64), (3072, 512))
TINY_LENGTHS = ((6, 4),)
MEMORY_CONTEXT = 4096
_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
)


def with_head(published: Settings, head: str) -> Settings:
    return published | {"quantization_config": published["quantization_config"] | {"head": head}}


def settings_of_all(tiny: bool) -> dict[str, Settings]:
    """Return the config.json of each side, by name."""
    small = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "vocab_size": 320}
    bitnet, qwen = (read_shipped(name) | (small if tiny else {}) for name in (BITNET, QWEN))
    if tiny:
        bitnet |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        qwen |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    dense = {name: bitnet[name] for name in _DIMENSIONS if name in bitnet}
    return {
        BITNET: bitnet,
        f"{BITNET}, int8 head": with_head(bitnet, "int8"),
        DENSE: dense | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        f"{QWEN}, dense head": with_head(qwen, "dense"),
    }


def opened(settings: Settings, folder: Path) -> tuple[Checkpoint, ModelConfig]:
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    checkpoint = open_checkpoint(str(path), load_format="dummy")
    return checkpoint, model_config(checkpoint.settings.config)


@dataclass(slots=True)
class Side:
    """One model in its engine, and what was measured of it."""

    name: str
    config: ModelConfig
    engine: Engine
    us: list[float] = field(default_factory=list)
    mj_per_token: float | None = None
    phases_us: dict[str, float] | None = None

    def bytes_per_token(self, prompt: int, new: int) -> int:
        """Weights, and the cache at its mean length."""
        backend = self.engine.backend
        if isinstance(backend, MegakernelBackend):
            weights = backend.megakernel.plan.bytes_per_token
        else:
            weights = bytes_read_per_token(self.config, 2, backend.device)
        return weights + (prompt + (new - 1) // 2) * self.config.kv_bytes_per_token()


def decode_row(side: Side, prompt: int, new: int, roofline: Roofline | None, dense_us: float | None) -> dict[str, Any]:
    """Return what a side's answers of one length come to."""
    us, read = spread(side.us), side.bytes_per_token(prompt, new)
    floor = read / roofline.gbps / 1e3 if roofline else None
    ternary = side.config.ternary
    return {
        "kind": "decode",
        "model": side.name,
        "backend": side.engine.backend.name,
        "head": "bf16" if ternary is None or ternary.head == "dense" else ternary.head,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "bytes_per_token": read,
        "us_per_token": us,
        "floor_us": floor and round(floor, 1),
        "percent_of_roofline": floor and round(100 * floor / us["median"], 1),
        "speedup": dense_us and round(dense_us / us["median"], 3),
        "mj_per_token": side.mj_per_token and round(side.mj_per_token, 3),
        "phases_us": side.phases_us,
    }


def kept(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the file's rows of other benchmarks, and of lengths that this run has not measured."""
    fresh = {(row["kind"], row.get("model"), row.get("prompt_tokens"), row.get("new_tokens")) for row in rows}
    old = rows_of_kinds(path, ("gemv", "prefill", "decode", "memory"))
    return [
        row
        for row in old
        if (row["kind"], row.get("model"), row.get("prompt_tokens"), row.get("new_tokens")) not in fresh
    ]


def phases_us(side: Side, prompt: int, token: int) -> dict[str, float] | None:
    """Return where the time of an answer's token goes, by a traced build."""
    backend = side.engine.backend
    if not isinstance(backend, MegakernelBackend):
        return None
    timeline = trace_token(backend, random_ids(prompt, side.config.vocab_size), token)
    return {part.kind: round(part.total_us, 2) for part in summarize(timeline)}


def memory_row(device: str, folder: Path) -> dict[str, Any]:
    """Load 2B-4T with one context, make some tokens, and return what it took at most."""
    checkpoint, config = opened(read_shipped(BITNET), folder)
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    held = torch.cuda.memory_allocated(device)
    engine = our_engine(checkpoint, config, device, MEMORY_CONTEXT)
    our_answer(engine, random_ids(1024, config.vocab_size), 32)
    used = free - torch.cuda.mem_get_info(device)[0]
    row = {
        "kind": "memory",
        "model": BITNET,
        "backend": engine.backend.name,
        "head": "bf16",
        "context_tokens": MEMORY_CONTEXT,
        "peak_allocated_gb": (torch.cuda.max_memory_allocated(device) - held) / 1e9,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        "used_gb": used / 1e9,
        "stated_gb": engine.backend.memory.total_bytes / 1e9,
    }
    engine.close()
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--energy", action="store_true", help="also mJ per token, where the GPU counts them")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="answers of each side (default: 7)")
    parser.add_argument("--seconds", type=float, default=480, help="start nothing new after this long (default: 480)")
    parser.add_argument("--commit", help="what to record as the commit")
    parser.add_argument("--out", type=Path, default=Path("results/ternary.json"))
    options = parser.parse_args(arguments)
    begun, device = time.monotonic(), "cpu" if options.tiny else "cuda:0"
    lengths = TINY_LENGTHS if options.tiny else LENGTHS
    rows: list[dict[str, Any]] = []
    machine: dict[str, Any] = {"device": "CPU", "driver": "none"}
    roofline, counter = None, None
    torch.manual_seed(0)

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    def keep(found: Sequence[dict[str, Any]]) -> None:
        rows.extend(found)
        write_results(options.out, [*kept(options.out, rows), *rows], commit=options.commit, **machine)

    with tempfile.TemporaryDirectory() as folder:
        if not options.tiny:
            try:
                keep([memory_row(device, Path(folder) / "memory")])
                say(f"peak {rows[-1]['peak_allocated_gb']:.2f} GB allocated, {rows[-1]['used_gb']:.2f} GB used")
            except (OnekernelError, RuntimeError):
                say(f"no memory row:\n{traceback.format_exc()}")
        context, sides = max(prompt + new for prompt, new in lengths), []
        for number, (name, settings) in enumerate(settings_of_all(options.tiny).items()):
            checkpoint, config = opened(settings, Path(folder) / str(number))
            source = DeviceDummy(checkpoint, device)
            sides.append(Side(name, config, our_engine(source, config, device, context)))
            say(f"{name} on {sides[-1].engine.backend.name}")
    if not options.tiny:
        backend = next(side for side in sides if side.name == DENSE).engine.backend
        if not isinstance(backend, MegakernelBackend):
            raise SystemExit(f"the dense model is on {backend.name}; there is nothing to compare with")
        roofline = read_roofline(backend.megakernel.packed.arena[: 1 << 31], device)
        found = facts(device)
        machine = {
            "device": found.name,
            "driver": found.driver_version,
            "sm_clock_mhz": roofline.sm_clock_mhz,
            "read_gbps": round(roofline.gbps, 1),
        }
        counter = counter_if_any(device, found.uuid) if options.energy else None
        say(f"plain read: {roofline.gbps:.0f} GB/s")
    for prompt, new in lengths:
        if time.monotonic() - begun > options.seconds:
            say(f"no time for {prompt} + {new}")
            break
        runs = [partial(our_answer, side.engine, random_ids(prompt, side.config.vocab_size), new) for side in sides]
        for turn in range(options.repeats + 1):
            for side, run in zip(sides, runs, strict=True):
                timing = run()
                side.us = [] if turn == 0 else [*side.us, timing.us_per_token]
        for side, run in zip(sides, runs, strict=True):
            calls = max(1, round(1e6 / (spread(side.us)["median"] * new)))
            per_answer = millijoules_per_call(counter, run, calls)
            side.mj_per_token = per_answer and per_answer / new
            try:
                side.phases_us = phases_us(side, prompt, min(8, new - 2))
            except (OnekernelError, RuntimeError):  # the times stand without it
                say(f"{side.name} has no trace:\n{traceback.format_exc()}")
        dense_us = spread(next(side for side in sides if side.name == DENSE).us)["median"]
        keep([decode_row(side, prompt, new, roofline, dense_us) for side in sides])
        for row in rows[-len(sides) :]:
            say(
                f"{row['model']}, {prompt} + {new}: {row['us_per_token']['median']:.1f} us per token, floor "
                f"{row['floor_us']}, {row['speedup']} times the dense model's rate"
            )
    for side in sides:
        side.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
