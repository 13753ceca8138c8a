"""The kernel for many tokens on ternary weights on a Hopper GPU: wgmma.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.kernels.ternary.product import STRIP_ROWS, UNIT_BYTES, UNIT_COLUMNS, many_params

LEAST_TOKENS = 128
"""With fewer the smaller tiles of prefill.cu keep more SMs busy: 64 tokens of 3840 x 2560 take 10 us there, 16 here."""


@dataclass(frozen=True, slots=True)
class WgmmaShape:
    """What a build depends on: `warpgroups` of four warps, each with `strips` strips of 16 rows, x `tokens` tokens."""

    warpgroups: int
    strips: int
    tokens: int
    stages: int = 6
    ctas: int = 1
    bf16: bool = False

    @property
    def rows(self) -> int:
        """Rows of a CTA's tile."""
        return self.warpgroups * 4 * self.strips * STRIP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warpgroups * 128

    def shared_bytes(self, units: int) -> int:
        """Return what a CTA takes, whatever the units: the ring, or all sums."""
        ring = self.stages * (self.rows // STRIP_ROWS * UNIT_BYTES + self.tokens * UNIT_COLUMNS)
        sums = self.tokens * (self.rows + 4) * 4
        return 1024 - 128 + max(ring, sums)  # the operands begin at a multiple of 1024

    def grid(self, strips: int, tokens: int) -> int:
        """Return how many CTAs multiply a matrix of that many strips with that many tokens."""
        return -(-strips * STRIP_ROWS // self.rows) * -(-tokens // self.tokens)

    def spec(self) -> KernelSpec:
        """Return the kernel for this shape."""
        return KernelSpec(
            file="ternary/wgmma.cu",
            entry="ternary_wgmma",
            constants={
                "TERNARY_GROUP": 0,
                "TERNARY_BF16": int(self.bf16),
                "WGMMA_WARPGROUPS": self.warpgroups,
                "WGMMA_STRIPS": self.strips,
                "WGMMA_TOKENS": self.tokens,
                "WGMMA_STAGES": self.stages,
                "WGMMA_CTAS": self.ctas,
            },
            params=many_params(self.bf16, ordered=True),
        )


CANDIDATES = (WgmmaShape(warpgroups=4, strips=1, tokens=128), WgmmaShape(warpgroups=4, strips=1, tokens=64))
"""Largest first; the fastest of thirteen, docs/ternary.md."""

_COSTS = dict(zip(CANDIDATES, (1.0, 1.33), strict=True))
"""Time of a product in each, next to the first: an SM takes 28.9 and 19.2 us for a tile of K = 2,560."""


ORDER_THREADS = 256
ORDER_SHARED_BYTES = ORDER_THREADS // 32 * 4
ORDER = KernelSpec(
    file="ternary/order.cu",
    entry="ternary_order",
    constants={"ORDER_THREADS": ORDER_THREADS},
    params=(
        Pointer("q", "int8", ("tokens", "columns")),
        Pointer("ordered", "int8", ("tokens", "width")),
        Pointer("sums", "int32", ("tokens",), align_bytes=4),
        Scalar("columns", "u32"),
        Scalar("width", "u32"),
    ),
)
"""Makes activations what the kernel takes, where their quantisation did not."""


def ordered_columns(columns: int) -> int:
    """Return how many columns ordered activations have: whole units."""
    return -(-columns // UNIT_COLUMNS) * UNIT_COLUMNS


def wgmma_shapes(bf16: bool = False) -> list[WgmmaShape]:
    """Return every shape that may be chosen."""
    return [replace(shape, bf16=bf16) for shape in CANDIDATES]


def choose_wgmma(strips: int, tokens: int, *, bf16: bool = False, sms: int = 132) -> WgmmaShape:
    """Return the shape with which the busiest SM has the least to do."""

    def work(shape: WgmmaShape) -> float:
        ctas = -(-shape.grid(strips, tokens) // sms)
        return ctas * shape.rows * shape.tokens * _COSTS[shape]

    return replace(min(CANDIDATES, key=work), bf16=bf16)
