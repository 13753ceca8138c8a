"""The attention phase's part of a plan: members of a KV head attend to the blocks they own.

A member publishes partials, or, where one chunk is all there is, the mixed values themselves with combine's tag.
"""

from __future__ import annotations

from onekernel.phases.frame import Frame, HeadShare, Records


def tasks(records: Records, frame: Frame, phase: int, share: HeadShare) -> None:
    """Fill the records of phase number `phase`, which takes q of its query heads, and k and v, from qkv."""
    config = frame.config
    group = config.num_attention_heads // config.num_key_value_heads
    records["first"] = share.first
    records["count"] = share.count
    records["inputs"] = (group + 2) * config.head_dim
    records["in_word"] = frame.words.qkv
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.partial
    records["stride"] = share.stride
    records["member"] = share.member
