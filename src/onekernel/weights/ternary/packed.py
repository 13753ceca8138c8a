"""What the two packed layouts of ternary weights share: strips of 16 rows, padding, and where their scales stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from onekernel.errors import ConfigError
from onekernel.weights.ternary.matrix import TernaryMatrix

STRIP_ROWS = 16
UNIT_COLUMNS = 128
"""Columns that a kernel takes at once: 512 bytes of a strip."""

MAX_COLUMNS = 1 << 17
"""With more, a sum of products of int8 values and codes could leave the integers that float32 holds exactly."""


@dataclass(frozen=True, slots=True)
class PackedTernary(ABC):
    """A ternary matrix of `shape` (N, K), two bits a weight, in the order in which a kernel reads it.

    `codes` is uint8 (strips, bytes of a strip): 16 rows each, all of their columns one after another. Rows are padded
    to 16 and columns to `COLUMNS` with the code of 0. `scales` is float32: (strips * 16,), one for each row, or with
    `group` (strips, groups, 16), both padded with 0. Packing loses nothing: `unpack` returns the matrix.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]
    rows: tuple[int, ...]
    group: int | None

    LAYOUT: ClassVar[str]
    COLUMNS: ClassVar[int]
    """What K is padded to a multiple of."""
    ZERO: ClassVar[int]
    """The code of weight 0; -1 and 1 are its neighbours."""

    def __post_init__(self) -> None:
        n, k = self.shape
        strips, columns = -(-n // STRIP_ROWS), -(-k // self.COLUMNS) * self.COLUMNS
        codes = (strips, columns * STRIP_ROWS // 4)
        scales: tuple[int, ...] = (strips * STRIP_ROWS,)
        if self.group is not None:
            scales = (strips, _groups(k, self.group), STRIP_ROWS)
        if self.codes.dtype != torch.uint8 or tuple(self.codes.shape) != codes:
            raise ConfigError(
                f"{self.LAYOUT} codes of a {n} x {k} matrix must be uint8 {codes}, not {self.codes.dtype} "
                f"{tuple(self.codes.shape)}"
            )
        if self.scales.dtype != torch.float32 or tuple(self.scales.shape) != scales:
            raise ConfigError(
                f"{self.LAYOUT} scales of a {n} x {k} matrix must be float32 {scales}, not {self.scales.dtype} "
                f"{tuple(self.scales.shape)}"
            )

    @classmethod
    def pack(cls, matrix: TernaryMatrix) -> Self:
        """Return the packed form of a matrix, on its device; raises ConfigError for more than 131,072 columns."""
        n, k = matrix.shape
        if k > MAX_COLUMNS:
            raise ConfigError(f"a ternary matrix of {k} columns; the kernels' sums are exact up to {MAX_COLUMNS}")
        padded = matrix.codes.new_full((n + -n % STRIP_ROWS, k + -k % cls.COLUMNS), cls.ZERO)
        torch.add(matrix.codes, cls.ZERO, out=padded[:n, :k])
        codes = cls._to_bytes(padded.view(torch.uint8))
        return cls(codes, _pack_scales(matrix), (n, k), matrix.rows, matrix.group)

    def unpack(self) -> TernaryMatrix:
        """Return the matrix."""
        return TernaryMatrix(self.unpack_codes(), self._unpack_scales(), self.rows, self.group)

    def unpack_codes(self) -> torch.Tensor:
        """Return the codes -1, 0 and 1, (N, K) int8."""
        n, k = self.shape
        return self._from_bytes(self.codes).view(torch.int8).sub_(self.ZERO)[:n, :k].contiguous()

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: what a product reads."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Self:
        """Return the same matrix on another device."""
        return type(self)(self.codes.to(device), self.scales.to(device), self.shape, self.rows, self.group)

    @staticmethod
    @abstractmethod
    def _to_bytes(codes: torch.Tensor) -> torch.Tensor:
        """Turn (padded N, padded K) codes of two bits, one a byte, into (strips, bytes)."""

    @staticmethod
    @abstractmethod
    def _from_bytes(packed: torch.Tensor) -> torch.Tensor:
        """Turn (strips, bytes) into (padded N, padded K) codes."""

    def _unpack_scales(self) -> torch.Tensor:
        n, k = self.shape
        if self.group is not None:
            by_rows = self.scales.transpose(1, 2).reshape(-1, self.scales.shape[1])
            return by_rows[:n, : k // self.group].contiguous()
        first_rows = list(accumulate(self.rows[:-1], initial=0))
        return self.scales[torch.tensor(first_rows, device=self.scales.device)]


def _pack_scales(matrix: TernaryMatrix) -> torch.Tensor:
    n, k = matrix.shape
    if matrix.group is None:
        return F.pad(matrix.row_scales(), (0, -n % STRIP_ROWS))
    groups = _groups(k, matrix.group)
    padded = F.pad(matrix.scales, (0, groups - matrix.scales.shape[1], 0, -n % STRIP_ROWS))
    return padded.view(-1, STRIP_ROWS, groups).transpose(1, 2).contiguous()


def _groups(k: int, group: int) -> int:
    """Return how many groups a padded row has: those of whole units, so that a unit finds its own in one place."""
    return -(-k // UNIT_COLUMNS) * (UNIT_COLUMNS // group)
