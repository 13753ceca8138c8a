"""Read what a kernel costs from the assembler's report and from the cubin: registers, spills, stack, code size."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from onekernel.errors import CompileError


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread and one CTA of a kernel take; every figure covers all functions of the cubin."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    """Static shared memory; what a launch adds is not in it."""
    sass_bytes: int


def read_resources(log: str, cubin: bytes) -> Resources:
    """Return the figures of ptxas' `-v` report in `log` and the size of the code in `cubin`."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise CompileError(f"the compiler's log has no 'Used N registers' line; was -v lost from its options?\n{log}")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return Resources(
        registers=max(registers),
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
        stack_bytes=max([int(n) for n in re.findall(r"(\d+) bytes (?:cumulative )?stack (?:frame|size)", log)] or [0]),
        shared_bytes=max([int(n) for n in re.findall(r"(\d+) bytes smem", log)] or [0]),
        sass_bytes=sum(size for name, size in sections(cubin).items() if name.startswith(".text.")),
    )


def sections(elf: bytes) -> dict[str, int]:
    """Return name -> size in bytes of the sections of a 64-bit ELF file."""
    if elf[:5] != b"\x7fELF\x02":
        raise CompileError(f"a cubin must be a 64-bit ELF file; this one starts with {elf[:5]!r}")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    return {_name(elf, names + header[0]): header[5] for header in headers}


def _name(elf: bytes, start: int) -> str:
    return elf[start : elf.index(b"\0", start)].decode()
