"""The gather phase's part of a plan: the owner of a hidden tile adds its part of all down rows to its residual."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, unit_flags


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`; `share` is that of the hidden tiles.

    `weights` is where the neurons begin, `k_units` and `stride` are the gate's units along K and rows of a tile.
    """
    gate = frame.layout.matrices["gate", layer]
    records["weights"] = frame.layout.neurons[layer].offset_bytes
    records["k_units"] = gate.k_units
    records["stride"] = gate.tile_rows
    records["flags"] = unit_flags(frame.layout.matrices["out", 0])
    records["first"] = share.first
    records["count"] = share.count
    records["in_word"] = frame.words.firing
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.x
