"""The gather phase's part of a plan: the owner of a hidden tile adds what all CTAs' neurons gave to its residual."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, unit_flags


def tasks(records: Records, frame: Frame, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`; `share` is that of the hidden tiles."""
    records["flags"] = unit_flags(frame.layout.matrices["out", 0])
    records["first"] = share.first
    records["count"] = share.count
    records["in_word"] = frame.words.sums
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.x
