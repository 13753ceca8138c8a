"""The tiles in which product.cu is built, and which of them a product of some size takes.

All give the same bits, so this is a matter of speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """A tile of tokens x weight rows, and how a CTA makes it.

    `ns_per_unit`: what a CTA needs for 64 columns of K with `ctas_per_sm` of them on each SM. The values below are
    estimates: the tile's bytes at 43 bytes per ns and SM out of an H200's L2. They choose as well as values fitted to
    measurements did (docs/findings/prefill.md); `benchmarks/prefill.py` makes such a fit.
    """

    tokens: int
    rows: int
    warps_m: int
    warps_n: int
    k_units: int
    """Pieces of 64 columns in a stage."""
    stages: int
    ctas_per_sm: int
    ns_per_unit: float

    @property
    def name(self) -> str:
        """tokens x rows."""
        return f"{self.tokens}x{self.rows}"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps_m * self.warps_n * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: its stages."""
        return self.stages * self.k_units * (self.tokens + self.rows) * 128

    def ctas(self, tokens: int, rows: int) -> int:
        """Return the CTAs of a product of this size."""
        return -(-tokens // self.tokens) * -(-rows // self.rows)


VARIANTS = (
    Variant(16, 16, 1, 2, k_units=4, stages=6, ctas_per_sm=2, ns_per_unit=190),
    Variant(16, 64, 1, 4, k_units=2, stages=4, ctas_per_sm=2, ns_per_unit=480),
    Variant(32, 32, 2, 2, k_units=2, stages=6, ctas_per_sm=2, ns_per_unit=380),
    Variant(64, 32, 4, 2, k_units=2, stages=4, ctas_per_sm=2, ns_per_unit=570),
    Variant(64, 128, 2, 4, k_units=1, stages=4, ctas_per_sm=2, ns_per_unit=1140),
    Variant(128, 128, 2, 2, k_units=1, stages=3, ctas_per_sm=2, ns_per_unit=1520),
    Variant(128, 256, 2, 4, k_units=1, stages=4, ctas_per_sm=1, ns_per_unit=1140),
)


def choose(tokens: int, rows: int, sms: int, variants: Sequence[Variant] = VARIANTS) -> Variant:
    """Return the variant that makes (tokens, rows) soonest: rounds of CTAs that the SMs hold, times a CTA's time."""
    return min(variants, key=lambda variant: rounds(variant, tokens, rows, sms) * variant.ns_per_unit)


def rounds(variant: Variant, tokens: int, rows: int, sms: int) -> float:
    """Return rounds of CTAs; a last one that leaves some of an SM's places empty takes less than a whole one."""
    ctas, held = variant.ctas(tokens, rows), sms * variant.ctas_per_sm
    whole, rest = divmod(ctas, held)
    return whole + (-(-rest // sms) / variant.ctas_per_sm)
