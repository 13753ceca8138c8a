"""The kernel for many tokens on ternary weights: prefill.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onekernel.device.spec import KernelSpec
from onekernel.kernels.ternary.product import STRIP_ROWS, UNIT_BYTES, UNIT_COLUMNS, many_params


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a build depends on: a CTA makes `strips` strips of 16 rows x `tokens` tokens with its grid of warps."""

    strips: int
    tokens: int
    row_warps: int
    token_warps: int
    stages: int = 3
    ctas: int = 1
    group: int = 0
    bf16: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.row_warps * self.token_warps * 32

    def shared_bytes(self, units: int) -> int:
        """Return what a CTA takes, whatever the units: the ring, and two sums of activations for each token."""
        groups = UNIT_COLUMNS // self.group if self.group else 0
        stage_bytes = self.strips * (UNIT_BYTES + groups * STRIP_ROWS * 4) + self.tokens * UNIT_COLUMNS
        return self.stages * stage_bytes + 2 * self.tokens * 4

    def grid(self, strips: int, tokens: int) -> int:
        """Return how many CTAs multiply a matrix of that many strips with that many tokens."""
        return -(-strips // self.strips) * -(-tokens // self.tokens)

    def spec(self) -> KernelSpec:
        """Return the kernel for this shape."""
        return KernelSpec(
            file="ternary/prefill.cu",
            entry="ternary_prefill",
            constants={
                "TERNARY_GROUP": self.group,
                "TERNARY_BF16": int(self.bf16),
                "PREFILL_STRIPS": self.strips,
                "PREFILL_TOKENS": self.tokens,
                "PREFILL_ROW_WARPS": self.row_warps,
                "PREFILL_TOKEN_WARPS": self.token_warps,
                "PREFILL_STAGES": self.stages,
                "PREFILL_CTAS": self.ctas,
            },
            params=many_params(self.bf16),
        )


CANDIDATES = (
    PrefillShape(strips=8, tokens=128, row_warps=4, token_warps=2, stages=4, ctas=1),
    PrefillShape(strips=8, tokens=64, row_warps=4, token_warps=1, stages=3, ctas=2),
    PrefillShape(strips=4, tokens=64, row_warps=4, token_warps=1, stages=3, ctas=4),
    PrefillShape(strips=4, tokens=32, row_warps=4, token_warps=1, stages=4, ctas=4),
)
"""Largest first: a larger tile makes an operand once for more products, a smaller one fills the GPU sooner."""

_COSTS = dict(zip(CANDIDATES, (1.0, 0.92, 1.06, 1.04), strict=True))
"""Time of a product in each, next to the first: fitted to four matrices and 512 tokens on an H200."""

WITH_GROUPS = PrefillShape(strips=4, tokens=64, row_warps=2, token_warps=2, stages=3, ctas=2)
"""The totals of ended groups take the registers of a larger tile."""


def prefill_shapes(group: int = 0, bf16: bool = False) -> list[PrefillShape]:
    """Return every shape that may be chosen."""
    if group:
        return [replace(WITH_GROUPS, group=group, bf16=bf16)]
    return [replace(shape, bf16=bf16) for shape in CANDIDATES]


def choose_prefill(strips: int, tokens: int, *, group: int = 0, bf16: bool = False, sms: int = 132) -> PrefillShape:
    """Return the shape with which the busiest SM has the least to do."""
    if group:
        return replace(WITH_GROUPS, group=group, bf16=bf16)

    def work(shape: PrefillShape) -> float:
        ctas = -(-shape.grid(strips, tokens) // sms)
        return ctas * shape.strips * shape.tokens * _COSTS[shape]

    return replace(min(CANDIDATES, key=work), bf16=bf16)
