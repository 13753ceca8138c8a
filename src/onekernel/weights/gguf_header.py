"""The head of a GGUF file: metadata as plain Python, and the table of tensors. No tensor data is touched.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from onekernel.errors import ModelError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code; 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a stored type packs values: elements in one block, bytes of one block, bytes behind all blocks."""

    name: str
    elements: int
    bytes: int
    trailer: int = 0


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    36: BlockType("I2_S", 128, 32, trailer=32),  # microsoft/BitNet's: a scale for the whole tensor behind it
    42: BlockType("Q2_0", 64, 18),
}
"""ggml's type number -> its layout, for the types that are read."""

_WIDE_Q2_0 = BlockType("Q2_0_128", 128, 34)
"""What PrismML's fork of llama.cpp writes under the number of Q2_0."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. Shape as PyTorch has it (GGUF lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    """Byte in the file."""

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.elements * self.type.bytes + self.type.trailer


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors by GGUF name in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(data: mmap, path: str) -> GgufHeader:
    """Parse the head of a mapped file.

    Raises ModelError if it is no GGUF file, cut or damaged, UnsupportedModelError for other versions and types.
    """
    cursor = _Cursor(data, path)
    if data[:4] != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {data[:4]!r}, not {_MAGIC!r}")
    cursor.position = 4
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path} is a big-endian GGUF; convert it with llama.cpp's gguf_convert_endian.py")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} is GGUF version {version}; versions 2 and 3 are read: convert the model again with llama.cpp"
        )
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    table = [_table_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    first = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _tensors(table, first, cursor))


class _Cursor:
    """Reads little-endian values one after another and never past the end."""

    def __init__(self, data: mmap, path: str) -> None:
        self.data, self.path, self.position, self.size = data, path, 0, len(data)

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is cut or damaged ({what}; the file has {self.size} bytes): fetch it again")

    def take(self, size: int) -> int:
        """Return the position of the next `size` bytes and step over them."""
        start = self.position
        if size > self.size - start:
            raise self.damaged(f"its head asks for {size} bytes at byte {start}")
        self.position = start + size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.damaged(f"value type {kind} at byte {self.position} does not exist")
        return self.number(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            if count * 8 > self.size - self.position:  # each string has at least its length
                raise self.damaged(f"{count} strings at byte {self.position}")
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damaged(f"array of value type {kind} at byte {self.position}")
        code = _SCALARS[kind]
        start = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))


def _table_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensors(table: list[tuple[str, tuple[int, ...], int, int]], first: int, cursor: _Cursor) -> dict[str, GgufTensor]:
    unknown = {number for _, _, number, _ in table if number not in BLOCK_TYPES}
    if unknown:
        refused = ", ".join(_type_name(number) for number in sorted(unknown))
        readable = ", ".join(block.name for block in BLOCK_TYPES.values())
        raise UnsupportedModelError(
            f"{cursor.path} has tensors of type {refused}, which is not built in; use a GGUF with {readable}"
        )
    tensors = {}
    types = BLOCK_TYPES | ({42: _WIDE_Q2_0} if _q2_0_is_wide(table, first, cursor.size) else {})
    for name, shape, number, offset in table:
        tensor = GgufTensor(name, shape, types[number], first + offset)
        if 0 in shape or shape[-1] % tensor.type.elements:
            raise cursor.damaged(f"{name} of shape {shape} does not divide into blocks of {tensor.type.name}")
        if name in tensors:
            raise cursor.damaged(f"{name} is there twice")
        if tensor.start + tensor.bytes > cursor.size:
            raise cursor.damaged(f"{name} ends at byte {tensor.start + tensor.bytes}")
        tensors[name] = tensor
    return tensors


def _q2_0_is_wide(table: list[tuple[str, tuple[int, ...], int, int]], first: int, size: int) -> bool:
    """Whether Q2_0 means blocks of 128: the first such tensor has no room for blocks of 64 before the next one."""
    for _, shape, number, offset in table:
        if BLOCK_TYPES[number].name == "Q2_0":
            room = min((other for *_, other in table if other > offset), default=size - first) - offset
            return room < math.prod(shape) // 64 * 18
    return False


def _type_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType  # late: half a second, and only needed for this message

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"
