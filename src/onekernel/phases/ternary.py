"""Products of ternary weights with int8 activations on PyTorch: the authority for every ternary kernel.

The rounding contract, for one token x (K,):

1. The residual and x are float32. A norm before the product is float32 as well: the mean of x^2 is taken in float64 and
   rounded once, then y = (x * (1 / sqrt(mean + eps))) * weight, each operation rounded to float32.
2. inverse = 127 / max(absmax(y), 1e-5), which PyTorch computes as the rounded reciprocal times 127;
   q = clamp(round(y * inverse), -128, 127), half to even. All in float32.
3. sums[n] = sum over k of q[k] * code[n, k]: whole numbers, exact in any order.
4. result[n] = float32(sums[n]) * (scale[n] / inverse), each operation rounded. With group scales the groups' terms,
   float32(sums of the group) * scale, are added in order of K and the total is divided by inverse.
5. Embedding, norm weights, a dense head and the KV cache have the model's dtype, as a rule bf16; attention and a dense
   head round their operands to it, as in every other model. Nothing else is rounded to bf16.

Where the models' own code differs: it rounds the normed values and their product with the norm weights to bf16, and the
residual after every addition. An int8 value is then another where that moves it over a half; the tests count them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onekernel.weights.ternary.matrix import TernaryMatrix

SMALLEST_ABSMAX = 1e-5
"""Lower bound of a token's largest absolute value, as in the models' own code."""

_CUDA_ROWS = 32
"""PyTorch's int8 product on a GPU takes more than 16 rows."""


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x (tokens, K) float32 by the contract's order of operations."""
    mean = x.double().square().mean(-1, keepdim=True).float()
    # PyTorch's root of many floats on a CPU is a unit off in 1 of 150; a float64 one, rounded, is the nearest float.
    root = (mean + eps).double().sqrt().float()
    return x * (1 / root) * weight


def quantise_activations(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values (tokens, K) of float32 y and what they were multiplied by, (tokens, 1) float32."""
    inverse = 127 / y.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_ABSMAX)
    q = (y * inverse).round().nan_to_num(0).clamp(-128, 127)  # inverse says that a value was NaN; an int8 cannot
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
        q, inverse = quantise_activations(x)
        matrix = self.matrix
        if matrix.group is None:
            return integer_sums(q, matrix.codes).float() * (matrix.row_scales() / inverse)
        total = torch.zeros(x.shape[0], matrix.shape[0], device=x.device)
        parts = zip(q.split(matrix.group, 1), matrix.codes.split(matrix.group, 1), matrix.scales.unbind(1), strict=True)
        for values, codes, scales in parts:
            total += integer_sums(values.contiguous(), codes).float() * scales
        return total / inverse

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the normed x."""
        return self.linear(norm(x, weight, eps))

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
        fine = ((x * inverse - coarse) * _FINE).round().nan_to_num(0).clamp(-127, 127).to(torch.int8)
        sums, rest = integer_sums(torch.cat((coarse, fine)), self.values).chunk(2)
        return (sums.float() + rest.float() / _FINE) * (self.scales / inverse)

    def normed_linear(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the normed x."""
        return self.linear(norm(x, weight, eps))
