"""The gate_up phase's part of a plan: a tile's gate rows and up rows become half as many inner values."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`, which takes what out published."""
    product(records, frame, "gate_up", layer, share)
    records["inputs"] = frame.hidden_inputs
    records["in_word"] = frame.words.x
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.inner
    records["norm"] = frame.layout.constants.mlp_norms[layer] + 1
