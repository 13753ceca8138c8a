"""What a plan must fit: the machine, and what the caller wants of it."""

from __future__ import annotations

from dataclasses import dataclass

from onekernel.config import PAGE_TOKENS
from onekernel.errors import ConfigError
from onekernel.weights.arena import UNIT_BYTES

MAX_CTAS = 256
"""More than any GPU has SMs. The choosing CTA has room for so many (CTA_ROOM in phases/choose/choice.cuh)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The defaults are those of an H100 or H200, whose `ctas` are 132."""

    ctas: int
    """One on each SM."""
    max_context: int
    """Tokens of one sequence, prompt and answer."""
    num_pages: int
    """Pages of the KV cache in each layer."""
    shared_bytes: int = 232448
    """Dynamic shared memory of a CTA."""
    consumer_warps: int = 16
    stage_bytes: int = 16384
    """One stage of the ring: a unit for each consumer warp."""
    sequences: int = 1
    block_pages: int = 4
    """Pages in a row that one CTA owns."""

    def __post_init__(self) -> None:
        for name in (
            "ctas",
            "max_context",
            "num_pages",
            "shared_bytes",
            "consumer_warps",
            "stage_bytes",
            "block_pages",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.ctas > MAX_CTAS:
            raise ConfigError(f"ctas is {self.ctas}; it must be at most {MAX_CTAS}: there is one on each SM of a GPU")
        if self.sequences not in (1, 8):
            raise ConfigError(f"sequences is {self.sequences}; a kernel is built for 1 or 8")
        if self.stage_bytes != self.consumer_warps * UNIT_BYTES:
            raise ConfigError(
                f"stage_bytes is {self.stage_bytes}; a stage holds one unit of {UNIT_BYTES} bytes for each of the "
                f"{self.consumer_warps} consumer warps, {self.consumer_warps * UNIT_BYTES}"
            )

    @property
    def table_pages(self) -> int:
        """Entries of a sequence's page table."""
        return -(-self.max_context // PAGE_TOKENS)
