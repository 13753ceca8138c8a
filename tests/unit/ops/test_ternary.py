"""The ternary operators on a CPU: the reference's bits, what torch.compile and opcheck demand, and their refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onekernel.errors import ConfigError
from onekernel.ops import ternary
from onekernel.ops.ternary import LAYOUTS, quantize_activation, ternary_linear
from onekernel.phases.ternary import TernaryReference, quantise_activations
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.tensor_core import TensorCoreTiles
from tests.ternary import integer_sums, random_activations, random_matrix

MATRICES: dict[str, TernaryMatrix] = {
    "one scale": random_matrix(48, 320),
    "three projections": random_matrix(35, 200, rows=(3, 20, 12)),
    "groups of 64": random_matrix(21, 192, group=64),
    "groups of 128": random_matrix(16, 1408, group=128),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MATRICES)
def test_a_product_has_the_reference_s_bits(layout: str, name: str) -> None:
    matrix = MATRICES[name]
    weight = LAYOUTS[layout].pack(matrix)
    x = torch.randn(2, 5, matrix.shape[1], generator=torch.Generator().manual_seed(1))
    q, scale = quantize_activation(x)
    got = ternary_linear(q, scale, weight)
    assert torch.equal(got, TernaryReference(matrix).linear(x.view(10, -1)).view(2, 5, -1))
    assert torch.equal(ternary_linear(q, scale, weight, torch.bfloat16), got.bfloat16())
    norm = torch.rand(matrix.shape[1], generator=torch.Generator().manual_seed(2)) + 0.5
    normed = ternary_linear(*quantize_activation(x, norm, 1e-5), weight)
    assert torch.equal(normed.view(10, -1), TernaryReference(matrix).normed_linear(x.view(10, -1), norm, 1e-5))
    want_q, want_scale = quantise_activations(x.view(10, -1))
    assert torch.equal(q.view(10, -1), want_q) and torch.equal(scale.view(10, 1), want_scale)


@settings(max_examples=40)
@given(n=st.integers(1, 40), k=st.integers(1, 200), tokens=st.integers(1, 20), seed=st.integers(0, 2**31))
@example(n=24, k=1, tokens=20, seed=0)
def test_sums_are_the_integers_own(n: int, k: int, tokens: int, seed: int) -> None:
    """With scales 1 a float32 result is the sum itself."""
    matrix = replace(random_matrix(n, k, seed), scales=torch.ones(1))
    x, _ = random_activations(tokens, k, seed)
    got = ternary_linear(x, torch.ones(tokens), TensorCoreTiles.pack(matrix))
    assert torch.equal(got.long(), integer_sums(x, matrix))


@pytest.mark.complaint(
    "L6",
    file="weights/ternary/packed.py",
    old="return F.pad(matrix.row_scales(), (0, -n % STRIP_ROWS))",
    new="return F.pad(matrix.scales.repeat_interleave(-(-n // len(matrix.rows)))[:n], (0, -n % STRIP_ROWS))",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [(2560, 640, 640), (6912, 6912), (100, 28)], ids=str)
def test_each_projection_of_a_fused_matrix_has_its_own_scale(layout: str, rows: tuple[int, ...]) -> None:
    """The published kernel splits the rows evenly among the scales: most of K's rows then get Q's or V's."""
    matrix = random_matrix(sum(rows), 96, rows=rows)
    x, _ = random_activations(2, 96)
    got = ternary_linear(x, torch.ones(2), LAYOUTS[layout].pack(matrix))
    first = 0
    for scale, count in zip(matrix.scales, rows, strict=True):
        part = slice(first, first + count)
        assert torch.equal(got[:, part], integer_sums(x, replace(matrix))[:, part].float() * scale)
        first += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_the_models(dtype: torch.dtype) -> None:
    """Rounded where they round; a value may differ by one where another order of the sum of squares crosses a half."""
    x = (torch.randn(64, 640, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    weight = torch.rand(640, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.5
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight
    want, want_scale = quantise_activations(normed.float())
    q, scale = quantize_activation(x, weight, 1e-5)
    torch.testing.assert_close(scale, want_scale[:, 0], rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)
    flips = (q.int() - want.int()).abs()
    assert flips.max() <= 1
    assert (flips > 0).float().mean() < 2e-3


def test_values_keep_to_what_a_step_can_say() -> None:
    x = torch.randn(7, 500, generator=torch.Generator().manual_seed(3)) * 1e3
    q, scale = quantize_activation(x)
    assert q.abs().amax(1).tolist() == [127] * 7
    assert ((q / scale[:, None] - x).abs() <= 0.5001 / scale[:, None]).all()
    q, scale = quantize_activation(torch.zeros(2, 3))
    assert not q.any() and scale.isfinite().all()


def test_half_precision_is_taken_to_float32() -> None:
    x = torch.randn(3, 64).half()
    for mine, theirs in zip(quantize_activation(x), quantize_activation(x.float()), strict=True):
        assert torch.equal(mine, theirs)


def test_no_tokens_are_no_results() -> None:
    weight = TensorCoreTiles.pack(MATRICES["one scale"])
    q, scale = quantize_activation(torch.zeros(2, 1, 320)[:, :0])
    assert ternary_linear(q, scale, weight).shape == (2, 0, 48)


@pytest.mark.parametrize("name", ["three projections", "groups of 64"])
def test_operators_are_what_pytorch_expects(name: str) -> None:
    """Schema, fake implementations and aliasing, by PyTorch's own check."""
    matrix = MATRICES[name]
    weight, (x, inverse) = TensorCoreTiles.pack(matrix), random_activations(3, matrix.shape[1])
    shape = [*matrix.shape, matrix.group or 0]
    args = (x, inverse, weight.codes, weight.scales, shape, weight.LAYOUT, torch.bfloat16)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ternary.linear, args, test_utils=checks)
    norm = torch.rand(matrix.shape[1])
    torch.library.opcheck(ternary.quantise, (torch.randn(3, matrix.shape[1]), norm, 1e-5), test_utils=checks)


def test_operators_stand_in_a_compiled_function() -> None:
    """Whole, without a break in the graph, and for another number of tokens."""
    weight = TensorCoreTiles.pack(MATRICES["three projections"])
    norm = torch.rand(200)

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_activation(x, norm)
        return torch.relu(ternary_linear(q, scale, weight)).square()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (1, 4, 9):
        x = torch.randn(tokens, 200)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.slow
def test_operators_stand_in_what_inductor_compiles() -> None:
    weight = TensorCoreTiles.pack(MATRICES["one scale"])

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, scale = quantize_activation(x)
        return torch.relu(ternary_linear(q, scale, weight)) + 1

    # On a CPU inductor links against torch's folder without quoting it.
    backend = "aot_eager" if " " in torch.__file__ else "inductor"
    x = torch.randn(4, 320)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))


X, SCALE = random_activations(2, 320)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x_q": X.float()}, r"x_q is torch.float32 \(2, 320\); a 48 x 320 matrix takes int8"),
        ({"x_q": X[0, 0], "x_scale": SCALE[0]}, r"x_q is torch.int8 \(\); a 48 x 320 matrix takes"),
        ({"x_q": X[:, :319]}, r"x_q is torch.int8 \(2, 319\)"),
        ({"x_scale": SCALE[:1]}, r"x_scale is torch.float32 \(1,\); it must be float32 \(2,\)"),
        ({"x_scale": SCALE.double()}, "x_scale is torch.float64"),
        ({"dtype": torch.float16}, "stored as float32 or bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    operands = {"x_q": X, "x_scale": SCALE, "weight": TensorCoreTiles.pack(MATRICES["one scale"])} | change
    with pytest.raises(ConfigError, match=said):
        ternary_linear(**operands)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_activations_of_no_values_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"x has shape .*; activations are \(..., K\) with K of 1 or more"):
        quantize_activation(torch.zeros(shape))


def test_a_norm_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights of shape \(3,\); activations of 4 values need \(4,\)"):
        quantize_activation(torch.zeros(1, 4), torch.ones(3))
