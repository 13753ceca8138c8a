"""The combine phase's part of a plan: the members of a KV head merge their partials, if there are several.

Each member merges a slice of the head's values, so that no word is waited for after another; see `plan.chunks.slices`.
"""

from __future__ import annotations

import numpy as np

from onekernel.phases.frame import Frame, HeadShare, Records


def tasks(records: Records, frame: Frame, phase: int, share: HeadShare) -> None:
    """Fill the records of phase number `phase`; how many partials it takes follows from the length.

    Where a KV head has one member there is nothing to merge, ever, and no CTA has work.
    """
    records["first"] = share.first
    records["count"] = np.where(share.members > 1, share.count, 0)
    records["in_word"] = frame.words.partial
    records["in_phase"] = phase - 1
    records["out_word"] = frame.words.mixed
    records["stride"] = share.stride
    records["member"] = share.member
