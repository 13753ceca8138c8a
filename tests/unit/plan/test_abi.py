"""The records that Python writes are those that the kernel's header declares."""

from __future__ import annotations

from pathlib import Path

import onekernel
from onekernel.kernels.megakernel import HEADER_BYTES
from onekernel.plan.abi import HEADER, RECORDS, TASK, header_text


def test_the_generated_header_is_up_to_date() -> None:
    header = Path(onekernel.__file__).parent / "kernels" / "abi.cuh"
    assert header.read_text() == header_text(), "run `python -m onekernel.plan.abi > src/onekernel/kernels/abi.cuh`"


def test_records_have_no_padding_and_natural_alignment() -> None:
    for record in RECORDS:
        offsets = record.dtype.fields
        assert offsets is not None
        end = 0
        for kind, offset, *_ in offsets.values():
            assert offset == end and offset % kind.itemsize == 0
            end += kind.itemsize
        assert record.dtype.itemsize == end and end % 8 == 0
    assert TASK.dtype.itemsize == 64, "tasks are copied in words of 8 bytes, one after another"
    assert HEADER.dtype.itemsize == HEADER_BYTES
    assert len(HEADER.fields) == len({field.name for field in HEADER.fields})
