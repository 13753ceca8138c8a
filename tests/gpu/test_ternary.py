"""The ternary operators on a real GPU: the CPU's bits at the models' shapes, in graphs, compiled, on any stream."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from onekernel.ops.ternary import LAYOUTS, quantize_activation, ternary_linear
from onekernel.ops.ternary_module import TernaryLinear
from onekernel.weights.ternary.packed import PackedTernary
from tests.ternary import random_activations, random_matrix

SHAPES: dict[str, tuple[int, int, tuple[int, ...], int | None]] = {
    "2560x2560": (2560, 2560, (), None),
    "3840x2560": (3840, 2560, (2560, 640, 640), None),
    "13824x2560": (13824, 2560, (6912, 6912), None),
    "2560x6912": (2560, 6912, (), None),
    "3200x10240": (3200, 10240, (), None),
    "odd": (1003, 1111, (1, 1002), None),
    "groups of 128": (2048, 6144, (), 128),
    "groups of 64": (1000, 4160, (), 64),
}


@cache
def packed(name: str, layout: str = "tensor_core") -> PackedTernary:
    n, k, rows, group = SHAPES[name]
    return LAYOUTS[layout].pack(random_matrix(n, k, rows=rows, group=group))


def check(weight: PackedTernary, tokens: int, dtype: torch.dtype = torch.float32) -> None:
    """On the GPU as on the CPU, and the same again."""
    x, scale = random_activations(tokens, weight.shape[1])
    on_gpu = weight.to("cuda")
    got = ternary_linear(x.cuda(), scale.cuda(), on_gpu, dtype)
    assert torch.equal(got.cpu(), ternary_linear(x, scale, weight, dtype))
    assert torch.equal(ternary_linear(x.cuda(), scale.cuda(), on_gpu, dtype), got)


@pytest.mark.parametrize(("layout", "name"), list(product(LAYOUTS, SHAPES)))
def test_products_have_the_cpu_s_bits(layout: str, name: str) -> None:
    weight = packed(name, layout)
    for tokens in (1, 3, 8, 17):
        check(weight, tokens)
    check(weight, 2, torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_tokens(layout: str) -> None:
    weight = packed("odd", layout)
    for tokens in (*range(1, 18), 33, 64, 130, 512):
        check(weight, tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_has_the_cpu_s_bits(name: str) -> None:
    weight = packed(name)
    for tokens in (33, 130, 512):
        check(weight, tokens, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
def test_activations_are_quantised_as_on_the_cpu(dtype: torch.dtype, norm: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, k in ((1, 2560), (7, 6912), (300, 1111)):
        x = (torch.randn(tokens, k, generator=generator) * 3).to(dtype)
        weight = torch.rand(k, generator=generator).to(dtype) + 0.5 if norm else None
        want_q, want_scale = quantize_activation(x, weight)
        q, scale = quantize_activation(x.cuda(), None if weight is None else weight.cuda())
        assert torch.equal(q.cpu(), want_q)
        assert torch.equal(scale.cpu(), want_scale)


def layer_and_input(tokens: int = 3) -> tuple[TernaryLinear, torch.Tensor]:
    layer = TernaryLinear(packed("3840x2560"), norm=torch.rand(2560) + 0.5).cuda()
    return layer, torch.randn(tokens, 2560, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_graph_records_a_layer(tokens: int) -> None:
    layer, x = layer_and_input(tokens)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, layer(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_layer_is_one_graph(mode: str) -> None:
    layer, x = layer_and_input()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        x = torch.randn_like(x)
        assert torch.equal(compiled(x).clone(), layer(x))


def test_kernels_run_on_the_current_stream() -> None:
    """Behind what that stream still has to do: the input is only ready after a long wait."""
    layer, x = layer_and_input()
    want = layer(x)
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        got = layer(late)
    stream.synchronize()
    assert torch.equal(got, want)


def test_a_view_into_the_middle_of_a_tensor_is_taken() -> None:
    weight = packed("odd").to("cuda")
    x, scale = random_activations(5, 1111)
    got = ternary_linear(x.cuda()[1:], scale.cuda()[1:], weight)
    assert torch.equal(got.cpu(), ternary_linear(x[1:], scale[1:], weight.to("cpu")))
