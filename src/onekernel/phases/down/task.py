"""The down phase's part of a plan: the owner of a hidden tile adds the feed-forward to its residual."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product
from onekernel.weights.arena import round_up


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`; `share` is that of the hidden tiles."""
    product(records, frame, "down", layer, share)
    records["inputs"] = round_up(frame.config.intermediate_size, 4)
    records["in_word"] = frame.words.inner
    records["in_phase"] = phase - 1
    if frame.layout.constants.mlp_sub_norms:
        records["norm"] = frame.layout.constants.mlp_sub_norms[layer] + 1
    records["out_word"] = frame.words.x
