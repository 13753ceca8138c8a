"""What a launch needs so that no wait in it can hang: the abort word, the table of who waited for what, the bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.device.kernel import Arg
from onekernel.device.spec import Pointer, Scalar
from onekernel.errors import DeviceError

WAITS = {
    1: "ring stage {id} to land",
    2: "ring stage {id} to be freed",
    3: "value {id}",
    4: "cluster value {id}",
    5: "the append in layer {id}",
    6: "value {id} of the choice",
}
"""`enum class Wait` in kernels/tile/spin.cuh, in words."""

MAX_TURNS = 1_000_000
"""How often a wait looks before it gives up: 2 seconds for a word and 4 for an mbarrier, measured on a stuck H200."""

PARAMS = (
    Pointer("abort", "int32", (1,), pinned=True, align_bytes=4),
    Pointer("records", "int64", ("ctas", "warps", 4)),
    Scalar("max_turns", "u32"),
)
"""The last parameters of every kernel that waits: `Watch` in kernels/tile/spin.cuh."""


@dataclass(frozen=True, slots=True)
class Waited:
    """One warp's unfinished wait. `expired`: its own patience ended, not somebody else's."""

    cta: int
    warp: int
    what: str
    expected: int
    seen: int
    expired: bool

    def __str__(self) -> str:
        who = f"CTA {self.cta} warp {self.warp}"
        reason = "gave up" if self.expired else "was told to stop"
        return f"{who} waited for {self.what}: expected {self.expected}, saw {self.seen}, {reason}"


@dataclass(frozen=True, slots=True)
class Watch:
    """The memory behind `PARAMS` for launches of one shape."""

    abort: torch.Tensor
    records: torch.Tensor
    max_turns: int

    @classmethod
    def create(cls, device: torch.device, ctas: int, threads: int, max_turns: int = MAX_TURNS) -> Watch:
        """Return a watch for `ctas` CTAs of `threads` threads; the abort word is pinned if the device is a GPU."""
        abort = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(abort, torch.zeros(ctas, threads // 32, 4, dtype=torch.int64, device=device), max_turns)

    @property
    def args(self) -> tuple[Arg, Arg, Arg]:
        """The arguments for `PARAMS`."""
        return self.abort, self.records, self.max_turns

    def stop(self) -> None:
        """Tell a running kernel to give up its waits and end."""
        self.abort.fill_(1)

    def waited(self) -> list[Waited]:
        """Return what the warps waited for when they gave up, the causes first; the launch must have ended."""
        found = [
            Waited(cta, warp, WAITS[kind & 0xFFFFFFFF].format(id=id), expected, seen, bool(kind >> 32))
            for cta, warps in enumerate(self.records.tolist())
            for warp, (kind, id, expected, seen) in enumerate(warps)
            if kind
        ]
        return sorted(found, key=lambda wait: not wait.expired)

    def check(self, entry: str) -> None:
        """Raise DeviceError with the table if the launch that has ended was stopped, by the host or by a wait."""
        if int(self.abort) == 0:
            return
        waits = self.waited()
        lines = [f"  {wait}" for wait in waits[:20]] + ([f"  and {len(waits) - 20} more"] if len(waits) > 20 else [])
        raise DeviceError("\n".join([f"kernel {entry} was stopped before its end", *lines]))
