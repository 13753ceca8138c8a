"""The out phase's part of a plan: the owner of a hidden tile adds the projected attention to its residual."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, product


def tasks(records: Records, frame: Frame, layer: int, phase: int, share: Share) -> None:
    """Fill the records of phase number `phase`; `share` is that of the hidden tiles."""
    product(records, frame, "out", layer, share)
    records["inputs"] = frame.config.q_size
    records["in_word"] = frame.words.mixed
    records["in_phase"] = phase - 1
    if frame.layout.constants.attention_sub_norms:
        records["norm"] = frame.layout.constants.attention_sub_norms[layer] + 1
    records["out_word"] = frame.words.x
