"""Both layouts are what their comments say, bit for bit, and lose nothing, whatever the shape and the scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onekernel.errors import ConfigError
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles
from tests.ternary import random_matrix

LAYOUTS: list[type[PackedTernary]] = [Blocks16x32, TensorCoreTiles]


def same(a: TernaryMatrix, b: TernaryMatrix) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and (a.rows, a.group) == (b.rows, b.group)


def field(words: list[int], word: int, byte: int, pair: int) -> int:
    return words[word] >> 8 * byte >> 2 * pair & 3


def words_of(packed: PackedTernary) -> list[int]:
    return [word % 2**32 for word in packed.codes.view(torch.int32).reshape(-1).tolist()]


def test_blocks_are_as_published() -> None:
    """Written out from the published description: block order, word order, and the interleave 0, 4, 8, 12, 1, ..."""
    n, k = 48, 96
    matrix = random_matrix(n, k)
    words = words_of(Blocks16x32.pack(matrix))
    slots = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
    for row in range(n):
        for column in range(k):
            block = row // 16 * (k // 32) + column // 32
            word = block * 32 + row % 16 // 8 * 16 + column % 32 // 16 * 8 + row % 8
            code = words[word] >> 2 * slots.index(column % 16) & 3
            assert code - 2 == matrix.codes[row, column]


def test_tiles_are_fragments_of_the_tensor_cores() -> None:
    """Every code once, where the lane's register of that product has it."""
    n, k = 32, 256
    matrix = random_matrix(n, k)
    words = words_of(TensorCoreTiles.pack(matrix))
    seen = set()
    for tile in range(n // 16 * (k // 128)):
        for lane in range(32):
            for j in range(4):
                for i in range(4):
                    for b in range(4):
                        row = tile // (k // 128) * 16 + lane // 4 + 8 * (j % 2)
                        inside = 64 * (i // 2) + 16 * (lane % 4) + 8 * (i % 2) + 4 * (j // 2) + b
                        column = tile % (k // 128) * 128 + inside
                        assert field(words, tile * 128 + lane * 4 + j, b, i) - 1 == matrix.codes[row, column]
                        seen.add((row, column))
    assert len(seen) == n * k


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=30)
@given(n=st.integers(1, 70), k=st.integers(1, 300), split=st.integers(0, 69), seed=st.integers(0, 2**31))
def test_nothing_is_lost(layout: type[PackedTernary], n: int, k: int, split: int, seed: int) -> None:
    rows = (split, n - split) if 0 < split < n else ()
    matrix = random_matrix(n, k, seed, rows)
    packed = layout.pack(matrix)
    assert same(packed.unpack(), matrix)
    assert same(layout.pack(packed.unpack()).to("cpu").unpack(), matrix)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k", "group"), [(16, 128, 64), (21, 192, 64), (40, 384, 128), (3, 64, 64)])
def test_group_scales_are_not_lost_either(layout: type[PackedTernary], n: int, k: int, group: int) -> None:
    matrix = random_matrix(n, k, group=group)
    packed = layout.pack(matrix)
    assert same(packed.unpack(), matrix)
    assert packed.scales[0, 0, 1] == matrix.scales[1, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 130), (16, 128), (5, 100)])
def test_padding_is_zero(layout: type[PackedTernary], n: int, k: int) -> None:
    """Padded weights are worth 0, so a sum over them is 0 whatever they meet; padded rows have scale 0 too."""
    packed = layout.pack(random_matrix(n, k))
    everything = packed._from_bytes(packed.codes).view(torch.int8) - packed.ZERO
    assert everything.shape[0] % 16 == 0 and everything.shape[1] % layout.COLUMNS == 0
    outside = torch.ones(everything.shape, dtype=torch.bool)
    outside[:n, :k] = False
    assert not everything[outside].any()
    assert not packed.scales[n:].any()


def test_two_bits_a_weight() -> None:
    for layout in LAYOUTS:
        packed = layout.pack(random_matrix(64, 256))
        assert packed.codes.numel() == 64 * 256 // 4
        assert packed.nbytes == 64 * 256 // 4 + 64 * 4


def test_a_converted_checkpoint_s_bytes_are_read() -> None:
    matrix = random_matrix(48, 64, rows=(32, 8, 8))
    published = Blocks16x32.pack(matrix).codes.view(torch.int8).reshape(48, 16)
    read = Blocks16x32.from_published(published, matrix.scales, matrix.rows)
    assert same(read.unpack(), matrix)
    with pytest.raises(ConfigError, match=r"\(32, 8\) rows .* in 48 published rows"):
        Blocks16x32.from_published(published, matrix.scales[:2], (32, 8))
    with pytest.raises(ConfigError, match=r"scales \(2,\)"):
        Blocks16x32.from_published(published, matrix.scales[:2], matrix.rows)


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (torch.full((15, 8), 0x55, dtype=torch.int8), "blocks of 16 x 32"),
        (torch.full((16, 9), 0x55, dtype=torch.int8), "blocks of 16 x 32"),
        (torch.full((16, 8), 0x54, dtype=torch.int8), "code 0"),
        (torch.full((16, 8), 0x55, dtype=torch.int32), "int8"),
        (torch.full((16,), 0x55, dtype=torch.int8), "int8"),
    ],
)
def test_what_is_not_published_is_refused(codes: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Blocks16x32.from_published(codes, torch.ones(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_that_do_not_fit_are_refused(layout: type[PackedTernary]) -> None:
    packed = layout.pack(random_matrix(32, 256))
    with pytest.raises(ConfigError, match="codes of a 32 x 512 matrix must be uint8"):
        layout(packed.codes, packed.scales, (32, 512), (32,), None)
    with pytest.raises(ConfigError, match=r"scales of a 32 x 256 matrix must be float32 \(2, 2, 16\)"):
        layout(packed.codes, packed.scales, (32, 256), (), 128)
    with pytest.raises(ConfigError, match="up to 131072"):
        layout.pack(TernaryMatrix(torch.zeros(1, 131_073, dtype=torch.int8), torch.ones(1)))
