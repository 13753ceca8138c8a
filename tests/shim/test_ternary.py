"""The ternary kernels: sums are the integers' own, results have the bits of the CPU's operators, at any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from onekernel.device.shim_build import Build
from onekernel.errors import DeviceError
from onekernel.kernels.prefill.specs import RESULTS
from onekernel.kernels.ternary.prefill import CANDIDATES, WITH_GROUPS, PrefillShape
from onekernel.kernels.ternary.product import ProductShape
from onekernel.kernels.ternary.quantise import QuantiseShape
from onekernel.kernels.ternary.wgmma import CANDIDATES as WGMMA_CANDIDATES
from onekernel.kernels.ternary.wgmma import WgmmaShape
from onekernel.ops import ternary_cpu
from onekernel.ops.ternary_launch import LinearShape, TernaryLauncher
from onekernel.phases.gate_up.reference import activate
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles
from tests.ternary import integer_sums, random_activations, random_matrix

DECODE = ProductShape("tensor_core", tokens=8, stages=3)
BLOCKS = ProductShape("blocks16x32", tokens=8, stages=3)
PREFILL = PrefillShape(strips=4, tokens=16, row_warps=2, token_warps=1, stages=2)
WGMMA = WgmmaShape(warpgroups=1, strips=1, tokens=64, stages=4)
SHAPES: dict[str, LinearShape] = {"decode": DECODE, "blocks": BLOCKS, "prefill": PREFILL, "wgmma": WGMMA}
"""Builds that most tests share: a build costs seconds, a launch milliseconds."""


def layout_of(shape: LinearShape) -> type[PackedTernary]:
    return Blocks16x32 if isinstance(shape, ProductShape) and shape.layout == "blocks16x32" else TensorCoreTiles


@pytest.fixture
def launcher(device) -> TernaryLauncher:
    return TernaryLauncher(device.load, sms=4)


def skip_without_wgmma(device, shape: LinearShape) -> None:
    on_gpu = isinstance(shape, WgmmaShape) and device.torch.type == "cuda"
    if on_gpu and torch.cuda.get_device_capability(device.torch) != (9, 0):
        pytest.skip("the products of warpgroups are Hopper's")


def inputs(launcher: TernaryLauncher, shape: LinearShape, x: torch.Tensor, inverse: torch.Tensor) -> list[torch.Tensor]:
    """What a kernel takes of the activations."""
    if not isinstance(shape, WgmmaShape):
        return [x, inverse]
    ordered, sums = launcher.order(x)
    return [ordered, inverse, sums]


def unit_scales(matrix: TernaryMatrix) -> TernaryMatrix:
    """The same codes with scales 1: a float32 result is then the integer sum itself."""
    return replace(matrix, scales=torch.ones_like(matrix.scales))


def check(
    launcher: TernaryLauncher, device, shape: LinearShape, matrix: TernaryMatrix, tokens: int, dtype=torch.float32
):
    """The kernel's result has the bits of the CPU's operator."""
    weight = layout_of(shape).pack(matrix)
    skip_without_wgmma(device, shape)
    x, inverse = random_activations(tokens, matrix.shape[1])
    place = device.torch
    out = launcher.linear(x.to(place), inverse.to(place), weight.to(place), dtype, shape)
    device.finish()
    want = ternary_cpu.linear(x, inverse, weight)
    assert torch.equal(out.cpu(), want.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("n", "k"), [(16, 128), (40, 672), (1, 1), (17, 130), (100, 96), (33, 1111), (5, 2048)], ids=str
)
def test_sums_are_the_integers_own(launcher: TernaryLauncher, device, shape: str, n: int, k: int) -> None:
    skip_without_wgmma(device, SHAPES[shape])
    matrix = unit_scales(random_matrix(n, k))
    for tokens in (1, 3, 8):
        x, _ = random_activations(tokens, k)
        weight = layout_of(SHAPES[shape]).pack(matrix).to(device.torch)
        ones = torch.ones(tokens, device=device.torch)
        out = launcher.linear(x.to(device.torch), ones, weight, torch.float32, SHAPES[shape])
        device.finish()
        assert torch.equal(out.cpu().long(), integer_sums(x, matrix))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_tokens(launcher: TernaryLauncher, device, shape: str) -> None:
    """Projections of 3, 20 and 12 rows, none of which ends with a strip, have scales of their own."""
    matrix = random_matrix(35, 288, rows=(3, 20, 12))
    for tokens in (*range(1, 18), 33, 130):
        check(launcher, device, SHAPES[shape], matrix, tokens)


def test_one_token_has_a_build_of_its_own(launcher: TernaryLauncher, device) -> None:
    for layout in ("tensor_core", "blocks16x32"):
        for n, k in ((35, 288), (40, 1111)):
            check(launcher, device, ProductShape(layout, 1, stages=3), random_matrix(n, k), 1)


@pytest.mark.parametrize(
    "shape",
    [
        replace(DECODE, group=64),
        replace(WITH_GROUPS, group=128),
        pytest.param(replace(DECODE, group=128), marks=pytest.mark.slow),
        pytest.param(replace(DECODE, tokens=1, group=64), marks=pytest.mark.slow),
        pytest.param(replace(WITH_GROUPS, group=64), marks=pytest.mark.slow),
        pytest.param(replace(BLOCKS, group=64), marks=pytest.mark.slow),
        pytest.param(replace(BLOCKS, tokens=1, group=128), marks=pytest.mark.slow),
    ],
    ids=lambda s: f"{type(s).__name__}-{getattr(s, 'layout', '')}-{s.tokens}-{s.group}",
)
def test_group_scales_add_up_in_one_order(
    launcher: TernaryLauncher, device, shape: ProductShape | PrefillShape
) -> None:
    """Fewer units than chains and more, the last one cut short with group 64."""
    for units in (3, 11):
        k = units * 128 - (64 if shape.group == 64 else 0)
        check(launcher, device, shape, random_matrix(21, k, group=shape.group), 11)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor_core", "blocks16x32"])
@pytest.mark.parametrize(
    ("split", "stages", "warps", "tokens"), [(1, 2, 8, 2), (2, 5, 8, 4), (4, 7, 4, 1), (8, 2, 16, 1)]
)
def test_every_way_to_share_the_work_gives_the_same_bits(
    launcher: TernaryLauncher, device, layout: str, split: int, stages: int, warps: int, tokens: int
) -> None:
    shape = ProductShape(layout, tokens, split=split, stages=stages, warps=warps)
    check(launcher, device, shape, random_matrix(72, 1472), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("shape", CANDIDATES, ids=lambda s: f"{s.strips * 16}x{s.tokens}")
def test_every_prefill_shape_gives_the_same_bits(launcher: TernaryLauncher, device, shape: PrefillShape) -> None:
    for n, k, tokens in ((150, 400, 33), (16, 128, 130), (7, 100, 17)):
        check(launcher, device, shape, random_matrix(n, k), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("shape", WGMMA_CANDIDATES, ids=lambda s: f"{s.rows}x{s.tokens}")
def test_every_wgmma_shape_gives_the_same_bits(launcher: TernaryLauncher, device, shape: WgmmaShape) -> None:
    """Rows and tokens of two CTAs each, scales that change inside a CTA, units fewer and more than stages."""
    for n, k, tokens in ((300, 672, 130), (7, 100, 33)):
        check(launcher, device, shape, random_matrix(n, k, rows=(1, n - 1)), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_rounded_to_bf16(launcher: TernaryLauncher, device, shape: str) -> None:
    check(launcher, device, replace(SHAPES[shape], bf16=True), random_matrix(24, 256), 5, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "result"),
    [
        (PREFILL, "relu2"),
        (WGMMA, "relu2"),
        (PREFILL, "add"),
        (WGMMA, "add"),
        pytest.param(replace(WITH_GROUPS, group=128), "relu", marks=pytest.mark.slow),
        pytest.param(replace(WITH_GROUPS, group=128), "add", marks=pytest.mark.slow),
        pytest.param(PREFILL, "silu", marks=pytest.mark.slow),
        pytest.param(WGMMA, "silu", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results_are_added_or_gated(
    launcher: TernaryLauncher, device, shape: PrefillShape | WgmmaShape, result: str
) -> None:
    """Eights of gate and of up alternate, and have scales of their own; a residual is added to, and nothing else is."""
    skip_without_wgmma(device, shape)
    n, k, tokens, place = 208 if result != "add" else 37, 384, 70, device.torch
    group = getattr(shape, "group", 0) or None
    matrix = random_matrix(n, k, rows=() if group or result == "add" else (8,) * (n // 8), group=group)
    weight, (x, inverse) = TensorCoreTiles.pack(matrix), random_activations(tokens, k)
    rows = ternary_cpu.linear(x, inverse, weight)
    before = torch.randn(tokens + 2, n if result == "add" else n // 2, generator=torch.Generator().manual_seed(2))
    if result == "add":
        want = before[:tokens] + rows
    else:
        gate, up = rows.view(tokens, -1, 2, 8).unbind(2)
        want = (activate(gate, result) * up).reshape(tokens, -1)
    x, inverse = F.pad(x, (0, 0, 0, 2), value=127), F.pad(inverse, (0, 2), value=1.0)
    out, packed = before.to(place), weight.to(place)
    args = [packed.codes, packed.scales.view(-1), *inputs(launcher, shape, x.to(place), inverse.to(place)), out]
    args += [packed.codes.shape[1], n, tokens, k, RESULTS[result]]
    grid = shape.grid(len(packed.codes), tokens)
    launcher.kernel(shape).launch(grid, shape.threads, args, shared_bytes=shape.shared_bytes(k // 128))
    device.finish()
    assert torch.equal(out.cpu()[tokens:], before[tokens:])
    if result == "silu":  # the exponential is the device's
        assert torch.allclose(out.cpu()[:tokens], want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out.cpu()[:tokens], want)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_outside_is_read_or_written(launcher: TernaryLauncher, device, shape: str) -> None:
    """Other numbers after the last activation and the last result: the first are not summed, the second stay."""
    skip_without_wgmma(device, SHAPES[shape])
    n, k, tokens, built = 21, 144, 3, SHAPES[shape]
    weight = layout_of(built).pack(random_matrix(n, k)).to(device.torch)
    x, inverse = random_activations(tokens, k)
    room = torch.full((tokens * k + 64,), 127, dtype=torch.int8, device=device.torch)
    room[: tokens * k] = x.reshape(-1).to(device.torch)
    out = torch.full((tokens * n + 64,), -77.0, device=device.torch)
    grid = built.grid(len(weight.codes), tokens)
    taken = inputs(launcher, built, room[: tokens * k].view(tokens, k), inverse.to(device.torch))
    args = [weight.codes, weight.scales, *taken, out[: tokens * n].view(tokens, n)]
    args += [weight.codes.shape[1], n, tokens, taken[0].shape[1]]
    if not isinstance(built, ProductShape):
        args.append(RESULTS["store"])
    launcher.kernel(built).launch(grid, built.threads, args, shared_bytes=built.shared_bytes(2))
    device.finish()
    assert (out[tokens * n :] == -77).all()
    assert torch.equal(out[: tokens * n].view(tokens, n).cpu(), ternary_cpu.linear(x, inverse, weight.to("cpu")))


def test_poison_in_padding_changes_nothing(launcher: TernaryLauncher, device) -> None:
    """Rows past N and columns past K may hold any code: their results are not stored, their activations are zeros."""
    matrix = random_matrix(21, 150)
    x, inverse = random_activations(8, 150)
    for shape in SHAPES.values():
        skip_without_wgmma(device, shape)
        weight = layout_of(shape).pack(matrix)
        full = weight._from_bytes(weight.codes)
        full[21:], full[:, 150:] = 3, 3
        poisoned = replace(weight, codes=weight._to_bytes(full)).to(device.torch)
        out = launcher.linear(x.to(device.torch), inverse.to(device.torch), poisoned, torch.float32, shape)
        device.finish()
        assert torch.equal(out.cpu(), ternary_cpu.linear(x, inverse, weight))


@pytest.mark.parametrize(
    ("build", "shape", "n", "k"),
    [
        (Build.ADDRESS, DECODE, 33, 1300),
        pytest.param(Build.ADDRESS, PREFILL, 70, 300, marks=pytest.mark.slow),
        pytest.param(Build.ADDRESS, WGMMA, 70, 500, marks=pytest.mark.slow),
        pytest.param(Build.ADDRESS, BLOCKS, 33, 1300, marks=pytest.mark.slow),
        pytest.param(Build.ADDRESS, replace(DECODE, tokens=1, group=64), 20, 192, marks=pytest.mark.slow),
        pytest.param(Build.ADDRESS, replace(WITH_GROUPS, group=128), 20, 1280, marks=pytest.mark.slow),
        pytest.param(Build.THREAD, replace(DECODE, warps=4, split=4), 20, 640, marks=pytest.mark.slow),
        pytest.param(Build.THREAD, PREFILL, 70, 300, marks=pytest.mark.slow),
        pytest.param(Build.THREAD, WGMMA, 40, 300, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sanitizers_find_nothing(shim, build: Build, shape: LinearShape, n: int, k: int) -> None:
    weight = layout_of(shape).pack(random_matrix(n, k, group=getattr(shape, "group", 0) or None))
    x, inverse = random_activations(7, k)
    launcher = TernaryLauncher(lambda spec: shim(spec, build=build), sms=2)
    assert torch.equal(
        launcher.linear(x, inverse, weight, torch.float32, shape), ternary_cpu.linear(x, inverse, weight)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "file", "old", "new"),
    [
        ("blocks", "ternary/strip.cuh", "async_copies_wait<STAGES - 2>();", "async_copies_wait<STAGES - 1>();"),
        ("blocks", "ternary/strip.cuh", "static_cast<i32>(skip * UNIT_BYTES) < bytes_left;", "unit + skip < units;"),
        ("blocks", "ternary/blocks.cu", "i32 sum = -2 * x[token];", "i32 sum = -x[token];"),
        ("decode", "ternary/strip.cuh", "barrier_sync(1 + in_cta, SHARE);", "__syncwarp();"),
        ("decode", "ternary/strip.cuh", "< columns_left[i]);", "< 9999);"),
        ("decode", "ternary/decode.cu", "odd = even << 2", "odd = even << 1"),
        ("prefill", "ternary/prefill.cu", "wait<PREFILL_STAGES - 2>();", "wait<PREFILL_STAGES - 1>();"),
        ("prefill", "ternary/prefill.cu", "row + 1 < rows);", "true);"),
        ("wgmma", "ternary/wgmma.cu", "wait<STAGES - 3>();", "wait<STAGES - 2>();"),
        ("wgmma", "ternary/wgmma.cu", "fence_proxy_async_shared();\n    __syncthreads();", "__syncwarp();"),
        ("wgmma", "ternary/wgmma.cu", "both = row + 1 < rows;", "both = true;"),
    ],
)
def test_a_fault_is_seen(shim, with_fault, shape: str, file: str, old: str, new: str) -> None:
    """Read too early or overwritten, past an end, without the offset, or codes of another bit pair."""
    spec = with_fault(SHAPES[shape].spec(), file, old, new)
    launcher = TernaryLauncher(
        lambda asked: shim(spec if asked.entry == spec.entry else asked, build=Build.ADDRESS), sms=2
    )
    seen = False
    for k in (1120, 896):  # the last block of a unit is missing; every warp but the last has as much to do
        weight = layout_of(SHAPES[shape]).pack(random_matrix(41, k))
        x, inverse = random_activations(2, k)
        try:
            out = launcher.linear(x, inverse, weight, torch.float32, SHAPES[shape])
        except DeviceError as error:
            seen = "AddressSanitizer" in str(error) or "ended while" in str(error)
        else:
            seen = not torch.equal(out, ternary_cpu.linear(x, inverse, weight))
        if seen:
            break
    assert seen


@pytest.mark.parametrize(
    ("dtype", "norm"),
    [
        (torch.bfloat16, True),
        (torch.float32, False),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
)
def test_activations_are_quantised_as_on_the_cpu(
    launcher: TernaryLauncher, device, dtype: torch.dtype, norm: bool
) -> None:
    for k in (1, 100, 2560):
        generator = torch.Generator().manual_seed(k)
        x = (torch.randn(5, k, generator=generator) * torch.tensor([1e-9, 1e-2, 1, 30, 1e4])[:, None]).to(dtype)
        weight = torch.rand(k, generator=generator).bfloat16().float() + 0.5 if norm else None
        place = device.torch
        q, inverse = launcher.quantise(x.to(place), None if weight is None else weight.to(place), 1e-5)
        device.finish()
        want_q, want_inverse = ternary_cpu.quantise(x, weight, 1e-5)
        assert torch.equal(q.cpu(), want_q)
        assert torch.equal(inverse.cpu(), want_inverse)


def test_ties_go_to_even(launcher: TernaryLauncher, device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    q, inverse = launcher.quantise(x.to(device.torch), None, 1e-5)
    device.finish()
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    assert inverse.tolist() == [1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_lost(launcher: TernaryLauncher, device, bad: float) -> None:
    """Otherwise a broken activation would become an ordinary token."""
    x = torch.ones(2, 600)
    x[1, 431] = bad
    for values, weight in ((x, None), (x.bfloat16(), torch.ones(600))):
        place = device.torch
        _, inverse = launcher.quantise(values.to(place), None if weight is None else weight.to(place), 1e-5)
        device.finish()
        for found in (inverse.cpu(), ternary_cpu.quantise(values, weight, 1e-5)[1]):
            assert (1 / found).isfinite().tolist() == [True, False]


@pytest.mark.slow
def test_the_sanitizer_finds_nothing_in_quantise(shim) -> None:
    x = torch.randn(2, 301).bfloat16()
    launcher = TernaryLauncher(lambda spec: shim(spec, build=Build.ADDRESS), sms=2)
    q, inverse = launcher.quantise(x, torch.ones(301), 1e-6)
    want = ternary_cpu.quantise(x, torch.ones(301), 1e-6)
    assert torch.equal(q, want[0]) and torch.equal(inverse, want[1])


def in_order(q: torch.Tensor) -> torch.Tensor:
    """Activations with the words of each sixteen as wgmma.cu takes them, zeros behind them to whole units."""
    padded = F.pad(q, (0, -q.shape[1] % 128))
    return padded.view(len(q), -1, 4, 4, 4).transpose(2, 3).reshape(len(q), -1)


def test_activations_are_put_in_the_order_of_the_codes(launcher: TernaryLauncher, device) -> None:
    for k in (16, 144, 2560):
        q, _ = random_activations(3, k)
        ordered, sums = launcher.order(q.to(device.torch))
        device.finish()
        assert torch.equal(ordered.cpu(), in_order(q))
        assert torch.equal(sums.cpu(), q.sum(1, dtype=torch.int32))


@pytest.mark.parametrize("norm", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_quantisation_in_the_order_of_the_codes_has_the_same_values(
    launcher: TernaryLauncher, device, norm: bool
) -> None:
    shape = QuantiseShape(bf16=False, norm=norm, ordered=True)
    for k in (16, 144, 2560):
        generator, place = torch.Generator().manual_seed(k), device.torch
        x = torch.randn(3, k, generator=generator) * torch.tensor([1e-2, 1, 1e4])[:, None]
        weight = torch.rand(k, generator=generator) + 0.5
        want, want_inverse = ternary_cpu.quantise(x, weight if norm else None, 1e-5)
        width = -(-k // 128) * 128
        q = torch.full((3, width), 77, dtype=torch.int8, device=place)
        inverse, sums = torch.zeros(3, device=place), torch.zeros(3, dtype=torch.int32, device=place)
        args = [x.to(place), weight.to(place), q, inverse, sums, k, width, 1e-5]
        launcher.kernel(shape).launch(3, shape.threads, args, shared_bytes=shape.shared_bytes)
        device.finish()
        assert torch.equal(q.cpu(), in_order(want))
        assert torch.equal(inverse.cpu(), want_inverse)
        assert torch.equal(sums.cpu(), want.sum(1, dtype=torch.int32))
