"""A ternary matrix knows what it is worth, and refuses what cannot be one."""

from __future__ import annotations

import pytest
import torch

from onekernel.errors import ConfigError
from onekernel.weights.ternary.matrix import TernaryMatrix


def codes(n: int = 6, k: int = 128) -> torch.Tensor:
    return torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(0))


def test_each_projection_has_its_scale() -> None:
    matrix = TernaryMatrix(codes(), torch.tensor([0.5, 2.0, 3.0]), rows=(1, 2, 3))
    want = torch.cat([0.5 * codes()[:1], 2.0 * codes()[1:3], 3.0 * codes()[3:]]).float()
    assert torch.equal(matrix.dequantised(), want)
    assert matrix.shape == (6, 128)


def test_one_scale_belongs_to_all_rows() -> None:
    matrix = TernaryMatrix(codes(), torch.tensor([0.25]))
    assert matrix.rows == (6,)
    assert torch.equal(matrix.dequantised(), codes() * 0.25)


@pytest.mark.parametrize("group", [64, 128])
def test_each_group_has_its_scale(group: int) -> None:
    scales = torch.rand(6, 256 // group)
    matrix = TernaryMatrix(codes(k=256), scales, group=group)
    for row in range(6):
        for column in (0, 63, 64, 127, 128, 255):
            assert matrix.dequantised()[row, column] == codes(k=256)[row, column] * scales[row, column // group]
    with pytest.raises(ConfigError, match="no one scale per row"):
        matrix.row_scales()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codes": codes() * 2}, "range from -2 to 2"),
        ({"codes": codes() + 1}, "range from 0 to 2"),
        ({"codes": codes().float()}, r"int8 of shape \(N, K\), not torch.float32"),
        ({"codes": codes()[0]}, "int8 of shape"),
        ({"codes": codes()[:0]}, "int8 of shape"),
        ({"scales": torch.ones(1, dtype=torch.bfloat16)}, "float32"),
        ({"scales": torch.ones(2)}, r"shape \(2,\).*need \(1,\)"),
        ({"rows": (2, 3)}, r"\(2, 3\) rows are 5 rows together; the matrix has 6"),
        ({"rows": (6, 0), "scales": torch.ones(2)}, r"\(6, 0\)"),
        ({"group": 32, "scales": torch.ones(6, 4)}, "64 or 128"),
        ({"group": 128, "codes": codes(k=192), "scales": torch.ones(6, 1)}, "divide K"),
        ({"group": 64, "scales": torch.ones(6, 1)}, r"need \(6, 2\)"),
        ({"group": 64, "scales": torch.ones(6, 2), "rows": (6,)}, "already belong to rows"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TernaryMatrix(**({"codes": codes(), "scales": torch.ones(1)} | change))  # type: ignore[arg-type]
