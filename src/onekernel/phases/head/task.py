"""The head phase's part of a plan: each CTA finds the likeliest of its rows of the vocabulary."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`. CTA c publishes in words 2 * c and 2 * c + 1 of BEST."""
    product(records, frame, "head", 0, share)
    records["inputs"] = frame.hidden_inputs
    records["in_word"] = frame.words.x
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.best
    records["norm"] = frame.layout.constants.final_norm + 1
