"""The choice of the next token: filters, and a draw that depends on (seed, position, token id) only."""

from onekernel.phases.choose.counts import TokenCounts
from onekernel.phases.choose.reference import Choice, choose

__all__ = ["Choice", "TokenCounts", "choose"]
