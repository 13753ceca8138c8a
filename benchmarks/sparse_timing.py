"""How much the sparse benchmarks run, and how they time it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.energy import millijoules_per_call
from benchmarks.sparse_llama import Sizes
from onekernel.measure.results import spread

FRACTIONS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
CHECKED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to run."""

    device: str
    tokens: int
    hidden: int
    inners: tuple[int, ...]
    fractions: tuple[float, ...]
    decode_tokens: tuple[int, ...]
    models: dict[str, Sizes]
    batch: tuple[int, int]
    repeats: int
    energy_s: float


GPU = Scale(
    device="cuda:0",
    tokens=16384,
    hidden=2048,
    inners=(5632, 8192),
    fractions=FRACTIONS,
    decode_tokens=(1, 8),
    models={"0.5B": Sizes(layers=8), "2B": Sizes(layers=38)},
    batch=(64, 2048),
    repeats=15,
    energy_s=0.4,
)
CPU = Scale("cpu", 96, 64, (208,), (0.02, 0.1), (1,), {"tiny": Sizes(2, 64, 96, 4, 99, 32)}, (2, 16), 2, 0.0)


def finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def time_us(call: Callable[[], object], device: str) -> float:
    if not device.startswith("cuda"):
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # half a millisecond in which the host gets ahead
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def interleaved(calls: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, dict[str, float]]:
    """Time every call in turn, `repeats` times after two for warming up."""
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeats + 2):
        for name, call in calls.items():
            us = time_us(call, device)
            if turn >= 2:
                samples[name].append(us)
    return {name: spread(values) for name, values in samples.items()}


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out[: len(want)].double() - want.double()).norm() / want.double().norm())


def per_token(
    scale: Scale, counter: Callable[[], float] | None, call: Callable[[], object], us: float, tokens: int
) -> float | None:
    """Return millijoules per token over a short while, or None where nothing counts them."""
    calls = max(int(scale.energy_s * 1e6 / us), 1)

    def run() -> None:
        for _ in range(calls):
            call()
        finish(scale.device)

    used = millijoules_per_call(counter, run, 1)
    return None if used is None else used / calls / tokens
