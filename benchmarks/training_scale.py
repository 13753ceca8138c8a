"""How much the training benchmarks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.sparse_llama import Sizes
from onekernel.ops.training_route import H200, TrainingCosts

L1 = 2e-5
"""The published coefficient."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to run; `energy_s` and `device` as in sparse_timing."""

    device: str
    tokens: int
    hidden: int
    inner: int
    fractions: tuple[float, ...]
    models: dict[str, Sizes]
    batch: tuple[int, int]
    repeats: int
    energy_s: float
    model_fractions: tuple[float, ...] = (0.005, 0.01)
    costs: TrainingCosts = H200

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return it compiled; on a CPU, where a run only shows that rows come, as it is."""
        return torch.compile(call) if self.device.startswith("cuda") else call


GPU = Scale(
    device="cuda:0",
    tokens=16384,
    hidden=2048,
    inner=5632,
    fractions=(0.005, 0.01, 0.02, 0.05),
    models={"0.5B": Sizes(layers=8), "2B": Sizes(layers=38)},
    batch=(8, 2048),
    repeats=15,
    energy_s=0.6,
)
CHEAP = TrainingCosts(call_us=0.0, gathered_bytes_per_us=1e8)
"""So that a tiny run takes the sparse way too."""

TINY = Sizes(2, 64, 96, 4, 99, 32)
CPU = Scale("cpu", 96, 64, 208, (0.02, 0.3), {"tiny": TINY}, (2, 16), 2, 0.0, (0.02,), CHEAP)


def milliseconds(us: dict[str, float]) -> dict[str, float]:
    """Return a spread of microseconds in milliseconds."""
    return {name: value if name == "repeats" else value / 1e3 for name, value in us.items()}


def allow_versions(device: str) -> None:
    """Let compiled code have a version for every way that layers take: PyTorch gives up after eight."""
    if device.startswith("cuda"):
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64
