"""The qkv phase's part of a plan: the normalised residual times rows of q, k and v, published raw."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`, which takes what the one before published: embed, or down."""
    product(records, frame, "qkv", layer, share)
    records["inputs"] = frame.hidden_inputs
    records["in_word"] = frame.words.x
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.qkv
    records["norm"] = frame.layout.constants.attention_norms[layer] + 1
