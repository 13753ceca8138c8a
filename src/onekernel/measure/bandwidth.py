"""How fast a device reads its memory: the limit of decode, which reads every weight once per token."""

from __future__ import annotations

import time

import torch

_CPU_BYTES = 1 << 28  # well over any last-level cache
_CUDA_BYTES = 1 << 30


def read_bandwidth(device: str, seconds: float = 0.2) -> float:
    """Return bytes per second of reading memory on "cpu" or "cuda:N": the best of repeated sums over a large buffer.

    Repeats for about `seconds`, at least three times. Uses torch's threads on a CPU.
    """
    on_gpu = device.startswith("cuda")
    buffer = torch.ones((_CUDA_BYTES if on_gpu else _CPU_BYTES) // 4, dtype=torch.float32, device=device)
    buffer.sum()  # first touch, and on a GPU the kernel's load
    rates: list[float] = []
    begun = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begun < seconds:
        start = time.perf_counter()
        float(buffer.sum())  # waits for the device
        rates.append(buffer.nbytes / (time.perf_counter() - start))
    return max(rates)
