"""The gate phase's part of a plan: a CTA's neurons, from the normalised residual to their part of the feed-forward."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`, which takes what out published; `share` is that of the gate's tiles.

    CTA c gives all hidden rows, at c times their number.
    """
    product(records, frame, "gate", layer, share)
    records["inputs"] = frame.hidden_inputs
    records["in_word"] = frame.words.x
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.sums
    records["norm"] = frame.layout.constants.mlp_norms[layer] + 1
