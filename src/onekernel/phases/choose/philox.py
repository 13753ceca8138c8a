"""Philox4x32-10, the counter-based random generator of the draw.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11. A word depends on (seed, position,
token id) and on nothing else: with no state, neither the order nor the partition of the computation, nor another
request, can change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

Word = Tensor | int
"""A 32-bit word, or an int64 tensor of them."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # a Weyl sequence: the golden ratio and sqrt(3) - 1
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Return the four output words of a counter of four words under a key of two, all in [0, 2**32).

    Tensors broadcast. Words given as ints cost nothing, so a counter with one tensor saves one and a half rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(word: Word, multiplier: int) -> tuple[Word, Word]:
    # The product of two words overflows a signed int64. With multiplier - 2**32, which is negative, it does not; the
    # low word is the same and the high word is short by exactly `word`.
    product = word * (multiplier - 2**32)
    return (product >> 32) + word, product & _MASK


def words(seed: int, positions: Tensor | int, token_ids: Tensor) -> Tensor:
    """Return the random words of ascending token ids (n,): int64 (n,) at a position, (p, n) at positions (p, 1).

    The counter is (token id >> 2, position, 0, 0), the key is the (low, high) half of the seed, and token id & 3 picks
    the output word.
    """
    key = seed & _MASK, seed >> 32
    span = int(token_ids[-1]) + 1
    if span > 4 * len(token_ids):
        outputs = _stack(philox((token_ids >> 2, positions, 0, 0), key))
        return outputs.gather(-1, (token_ids & 3).expand(outputs.shape[:-1])[..., None])[..., 0]
    # Few gaps: one evaluation serves four neighbours.
    groups = torch.arange((span + 3) // 4, device=token_ids.device)
    dense = _stack(philox((groups, positions, 0, 0), key)).flatten(-2)[..., :span]
    return dense if span == len(token_ids) else dense[..., token_ids]


def _stack(outputs: tuple[Word, Word, Word, Word]) -> Tensor:
    # After ten rounds every output depends on every counter word, so all four are tensors of the broadcast shape.
    return torch.stack([torch.as_tensor(output) for output in outputs], dim=-1)
