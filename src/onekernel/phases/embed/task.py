"""The embed phase's part of a plan: the owner of a hidden tile looks up its rows of the token that was chosen."""

from __future__ import annotations

from onekernel.phases.frame import Frame, Records, Share, unit_flags


def tasks(records: Records, frame: Frame, share: Share) -> None:
    """Fill the records; `share` is that of the hidden tiles. The token comes from choose, one token before."""
    records["weights"] = frame.layout.embedding_bytes
    records["flags"] = unit_flags(frame.layout.matrices["out", 0])
    records["first"] = share.first
    records["count"] = share.count
    records["in_word"] = frame.words.token
    records["in_phase"] = frame.phases - 1
    records["out_word"] = frame.words.x
