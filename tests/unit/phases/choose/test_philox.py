"""The generator: its published test vectors, an independent implementation, and which counter a token gets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onekernel.phases.choose.philox import philox, words

WORD = st.integers(0, 2**32 - 1)
ONES = 0xFFFFFFFF

KNOWN = [  # Random123, kat_vectors: counter, key, output
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The paper's definition on Python's unbounded integers."""
    x, y = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(right >> 32) ^ x[1] ^ y[0], right % 2**32, (left >> 32) ^ x[3] ^ y[1], left % 2**32]
        y = [(y[0] + 0x9E3779B9) % 2**32, (y[1] + 0xBB67AE85) % 2**32]
    return tuple(x)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_vectors_with_ints_and_with_tensors(
    counter: tuple[int, int, int, int], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    assert philox(counter, key) == output
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == output


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=8), st.tuples(WORD, WORD))
def test_vectorised_equals_the_definition(counters: list[tuple[int, int, int, int]], key: tuple[int, int]) -> None:
    c0, c1, c2, c3 = torch.tensor(counters).T
    assert torch.stack([torch.as_tensor(w) for w in philox((c0, c1, c2, c3), key)], -1).tolist() == [
        list(plain_philox(counter, key)) for counter in counters
    ]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.sets(st.integers(0, 200), min_size=1).map(sorted) | st.sets(st.integers(0, 300_000), min_size=1).map(sorted),
)
def test_a_token_has_its_own_word_whatever_else_is_asked(seed: int, position: int, token_ids: list[int]) -> None:
    key = (seed % 2**32, seed // 2**32)
    expected = [plain_philox((token // 4, position, 0, 0), key)[token % 4] for token in token_ids]
    assert words(seed, position, torch.tensor(token_ids)).tolist() == expected


@pytest.mark.parametrize("token_ids", [torch.arange(11), torch.tensor([2, 3, 9]), torch.tensor([5, 70_000])])
def test_many_positions_at_once(token_ids: torch.Tensor) -> None:
    positions = torch.tensor([0, 1, 4095, 2**31])
    together = words(2**63 + 5, positions[:, None], token_ids)
    assert together.shape == (4, len(token_ids))
    for row, position in zip(together, positions.tolist(), strict=True):
        assert row.tolist() == words(2**63 + 5, position, token_ids).tolist()
