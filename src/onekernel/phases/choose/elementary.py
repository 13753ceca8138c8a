"""Exponential, logarithm and Gumbel noise in float32, written out in additions, multiplications and divisions.

Those are rounded the same way by every IEEE machine; the `log` and `exp` of mathematical libraries are not. So the
same logits give the same token on a CPU of any make, in PyTorch on a GPU, and in a kernel that repeats this file
operation by operation (multiply and add rounded separately, never fused).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN2 = math.log(2.0)
_LN2_HIGH = 0.693145751953125  # 14 bits, so that its product with an exponent is exact
_LN2_LOW = _LN2 - _LN2_HIGH
_SQRT_HALF_BITS = 0x3F3504F3
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def uniform(words: Tensor) -> Tensor:
    """Return v = (word + 1/2) / 2**32, float32 and below 1, of words in [0, 2**32), int64."""
    return ((2 * words + 1).float() * 2.0**-33).clamp(max=_LARGEST_BELOW_ONE)


def gumbel(v: Tensor) -> Tensor:
    """Turn uniform numbers into standard Gumbel noise by inversion: E = -log1p(-v) is exponential, -log(E) is Gumbel.

    The noise of `uniform` goes from -2.8 to 22.9. A draw is won by large noise, which is small E, which is small v;
    there v has its full 24 bits however small it is, and log1p keeps them. Starting from E = -log(v) would put the
    winners near v = 1, where float32 has steps of 6e-8: the tail would end at 16.6 and be a staircase well before. Here
    the coarse end belongs to the losers.
    """
    exponent, fraction = _split(1.0 - v)
    exponential = -_log(exponent, torch.where(exponent == 0, -v, fraction))  # 1 - v has rounded a small v away
    return -_log(*_split(exponential))


def exp(x: Tensor) -> Tensor:
    """Return e**x of float32 numbers of at most 0, within 3e-7 of its value (relative); exactly 0 below -87."""
    k = (x.clamp(min=-87.0) * (1.0 / _LN2)).round()
    r = (x.clamp(min=-87.0) - k * _LN2_HIGH) - k * _LN2_LOW
    power = torch.full_like(r, 1.0 / 720.0)
    for inverse_factorial in (1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        power = power * r + inverse_factorial
    scaled = (power.view(torch.int32) + (k.int() << 23)).view(torch.float32)
    return scaled.masked_fill(x < -87.0, 0.0)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Write x as 2**exponent * (1 + fraction) with 1 + fraction from sqrt(1/2) to sqrt(2); the fraction is exact."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32) - 1.0


def _log(exponent: Tensor, fraction: Tensor) -> Tensor:
    # log(1 + f) = 2 artanh(s) with s = f / (2 + f), at most 0.172: five terms of its series leave 2e-9.
    s = fraction / (fraction + 2.0)
    z = s * s
    series = z * (2.0 / 9.0)
    for coefficient in (2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0):
        series = (series + coefficient) * z
    return (series + 2.0) * s + exponent.float() * _LN2
