"""The gate phase's part of a plan: a CTA's neurons, from the normalised residual to what each that fires comes to."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`, which takes what out published; `share` is that of the gate's tiles.

    A tile gives a word that says which of its neurons fire, and each of those a word of what it came to.
    """
    product(records, frame, "gate", layer, share)
    records["inputs"] = frame.hidden_inputs
    records["in_word"] = frame.words.x
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.firing
    records["norm"] = frame.layout.constants.mlp_norms[layer] + 1
