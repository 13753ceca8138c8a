"""The choose phase's part of a plan: CTA 0 alone picks among the CTAs' best, and decides whether to stop."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records


def tasks(records: Records, frame: Frame, phase: int) -> None:
    """Fill the records of phase number `phase`."""
    records["count"][0] = 1
    records["in_word"] = frame.words.best
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.token
