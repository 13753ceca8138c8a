"""Products of ternary weights with int8 activations on PyTorch: the authority for every ternary kernel.

The rounding contract, for one token x (K,):

1. The residual and x are float32. A norm before the product is float32 as well, and its root is no part of what is
   rounded to int8: t = x * weight, rounded, and rms = sqrt(mean(x^2) + eps). Without a norm t = x and rms = 1.
2. inverse = 127 / max(absmax(t), least), which PyTorch computes as the rounded reciprocal times 127;
   q = clamp(round(t * inverse), -128, 127), half to even. All in float32. least is 1e-5, and 1e-10 before a norm: that
   multiplies with 1 / sqrt(eps) at most, so what it makes larger than 1e-5 was larger than 1e-10.
3. sums[n] = sum over k of q[k] * code[n, k]: whole numbers, exact in any order.
4. result[n] = float32(sums[n]) * (scale[n] / (inverse * rms)), each operation rounded. With group scales the groups'
   terms, float32(sums of the group) * scale, are added in order of K and the total is divided by inverse * rms.
5. The mean is the sum of the squares, rounded, times the rounded 1 / K. The sum is float32 in an order that K alone
   decides. Of n values "in halves" is: the second half is added to the first, value by value, until one is left.
   Columns, with zeros behind them, are fours, and each is summed in halves. Sum number i of these is added to those of
   i - 128, i - 256, ..., the first of them first. What comes of it is 128 values: fours again, summed in halves, and
   the 32 sums in halves.
6. Embedding, norm weights, a dense head and the KV cache have the model's dtype, as a rule bf16; attention and a dense
   head round their operands to it, as in every other model. Nothing else is rounded to bf16.

Why the root is apart: it is a sum over all of x, which nothing waits for before the result. In the order of the models'
own code a kernel waits for the sum, then for the largest value, and sees every input three times.

Where the models' own code differs: it rounds the normed values and their product with the norm weights to bf16, and the
residual after every addition. An int8 value is then another where that moves it over a half; the tests count them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.weights.ternary.activations import SMALLEST_ABSMAX, SMALLEST_BEFORE_NORM, root_mean_square
from onekernel.weights.ternary.matrix import TernaryMatrix

_CUDA_ROWS = 32
"""PyTorch's int8 product on a GPU takes more than 16 rows."""


def quantise_activations(t: torch.Tensor, least: float = SMALLEST_ABSMAX) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values (tokens, K) of float32 t and what they were multiplied by, (tokens, 1) float32."""
    inverse = 127 / t.abs().amax(dim=-1, keepdim=True).clamp(min=least)
    q = (t * inverse).round().nan_to_num(0).clamp(-128, 127)  # inverse says that a value was NaN; an int8 cannot
    return q.to(torch.int8), inverse


def integer_sums(q: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return q @ values.T exactly, (tokens, N) int32, for int8 q (tokens, K) and int8 values (N, K).

    On a CPU PyTorch's int8 product reads a quarter of float32's bytes and is 3 to 60 times as fast as expanding the
    codes (one thread with VNNI: a 13824 x 2560 matrix in 1.3 ms for one token, 62 ms for 512).
    """
    tokens = q.shape[0]
    if q.shape[1] == 1:  # PyTorch 2.13's product of single columns is garbage on a CPU
        return q.int() * values.int().t()
    if q.is_cuda and tokens < _CUDA_ROWS:
        q = torch.nn.functional.pad(q, (0, 0, 0, _CUDA_ROWS - tokens))
    return torch._int_mm(q, values.t())[:tokens]


@dataclass(frozen=True, slots=True)
class TernaryReference:
    """A ternary matrix as the reference multiplies it: one byte a code."""

    matrix: TernaryMatrix

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x (tokens, K) float32, quantised to int8: (tokens, N) float32. See the contract."""
        return self._product(*quantise_activations(x))

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the normed x."""
        q, inverse = quantise_activations(x * weight, SMALLEST_BEFORE_NORM)
        return self._product(q, inverse * root_mean_square(x, eps))

    def _product(self, q: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        if matrix.group is None:
            return integer_sums(q, matrix.codes).float() * (matrix.row_scales() / inverse)
        total = torch.zeros(q.shape[0], matrix.shape[0], device=q.device)
        parts = zip(q.split(matrix.group, 1), matrix.codes.split(matrix.group, 1), matrix.scales.unbind(1), strict=True)
        for values, codes, scales in parts:
            total += integer_sums(values.contiguous(), codes).float() * scales
        return total / inverse

    def __getitem__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows, (tokens, K) float32: a ternary embedding."""
        codes = self.matrix.codes[token_ids].float()
        if self.matrix.group is None:
            return codes * self.matrix.row_scales()[token_ids, None]
        return codes * self.matrix.scales[token_ids].repeat_interleave(self.matrix.group, dim=1)


_FINE = 254
"""Steps of the second int8 value of an activation in one of the first: half a step either way fits an int8."""


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """A head (N, K) as int8 rows with a scale each.

    Activations are two int8 values, coarse and fine, so that only the weights are rounded noticeably. Both are rows of
    one integer product, which reads the weights once.
    """

    values: torch.Tensor
    """(N, K) int8."""
    scales: torch.Tensor
    """(N,) float32."""

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x (tokens, K) float32: (tokens, N) float32."""
        coarse, inverse = quantise_activations(x)
        return self._product(x, coarse, inverse, inverse)

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the normed x."""
        t = x * weight
        coarse, inverse = quantise_activations(t, SMALLEST_BEFORE_NORM)
        return self._product(t, coarse, inverse, inverse * root_mean_square(x, eps))

    def _product(
        self, t: torch.Tensor, coarse: torch.Tensor, inverse: torch.Tensor, divisor: torch.Tensor
    ) -> torch.Tensor:
        fine = ((t * inverse - coarse) * _FINE).round().nan_to_num(0).clamp(-127, 127).to(torch.int8)
        sums, rest = integer_sums(torch.cat((coarse, fine)), self.values).chunk(2)
        return (sums.float() + rest.float() / _FINE) * (self.scales / divisor)
