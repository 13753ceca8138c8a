"""A ternary matrix as numbers: codes and scales, before any layout. Readers make it, layouts pack it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.errors import ConfigError

GROUPS = (64, 128)
"""Sizes that a group of columns with a scale of its own may have."""


@dataclass(frozen=True, slots=True)
class TernaryMatrix:
    """A (N, K) matrix whose value is code times scale, with codes -1, 0 and 1.

    Without `group`, `scales` is (R,): one for each of R projections fused along N, which have `rows[r]` rows each (all
    N rows in one by default). With `group` 64 or 128, `scales` is (N, K / group): one for each run of that many columns
    of a row. Scales always multiply; a checkpoint that stores their reciprocals is inverted by its reader.

    Raises ConfigError if a shape, dtype or code is not as stated.
    """

    codes: torch.Tensor
    """(N, K) int8."""
    scales: torch.Tensor
    """(R,) or (N, K / group) float32."""
    rows: tuple[int, ...] = ()
    group: int | None = None

    def __post_init__(self) -> None:
        codes, scales = self.codes, self.scales
        if codes.dtype != torch.int8 or codes.dim() != 2 or 0 in codes.shape:
            raise ConfigError(f"ternary codes must be int8 of shape (N, K), not {codes.dtype} {tuple(codes.shape)}")
        if scales.dtype != torch.float32 or scales.device != codes.device:
            raise ConfigError(
                f"ternary scales must be float32 on {codes.device}, where the codes are, not {scales.dtype} on "
                f"{scales.device}"
            )
        if codes.device.type != "meta":
            low, high = (int(end) for end in codes.aminmax())
            if low < -1 or high > 1:
                raise ConfigError(
                    f"ternary codes must be -1, 0 or 1; these range from {low} to {high}: was a packed form not "
                    f"decoded, or the offset of its codes not subtracted?"
                )
        object.__setattr__(self, "rows", self._checked_rows())
        wanted = (len(self.rows),) if self.group is None else (codes.shape[0], codes.shape[1] // self.group)
        if tuple(scales.shape) != wanted:
            raise ConfigError(
                f"ternary scales have shape {tuple(scales.shape)}; {len(self.rows)} projections in groups of "
                f"{self.group} of a {tuple(codes.shape)} matrix need {wanted}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def row_scales(self) -> torch.Tensor:
        """Return the scale of each row, (N,) float32; only for matrices without groups."""
        if self.group is not None:
            raise ConfigError(f"a matrix with groups of {self.group} has no one scale per row; read its scales")
        return self.scales.repeat_interleave(torch.tensor(self.rows, device=self.scales.device))

    def dequantised(self) -> torch.Tensor:
        """Return the matrix (N, K) in float32."""
        if self.group is None:
            return self.codes.float() * self.row_scales()[:, None]
        return self.codes.float() * self.scales.repeat_interleave(self.group, dim=1)

    def _checked_rows(self) -> tuple[int, ...]:
        n, k = self.shape
        if self.group is not None:
            if self.group not in GROUPS or k % self.group:
                raise ConfigError(f"a group of {self.group} columns in K {k}: it must be 64 or 128 and divide K")
            if self.rows:
                raise ConfigError(f"rows {self.rows} and groups of {self.group}: these scales already belong to rows")
            return ()
        rows = self.rows or (n,)
        if min(rows) < 1 or sum(rows) != n:
            raise ConfigError(f"projections of {rows} rows are {sum(rows)} rows together; the matrix has {n}")
        return rows
