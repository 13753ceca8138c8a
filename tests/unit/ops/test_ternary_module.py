"""A ternary layer is what it replaces, in our modules and in transformers' models with both conventions of scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

from onekernel.errors import ConfigError
from onekernel.ops.ternary_module import TernaryLinear, replace_linears
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.tensor_core import TensorCoreTiles
from tests.ternary import random_matrix


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles its own quantisation when it is first called, which takes longer than all else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def codes_of(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return random_matrix(n, k, seed).codes


def test_a_layer_takes_any_shape_and_dtype() -> None:
    matrix = random_matrix(24, 96)
    layer = TernaryLinear(TensorCoreTiles.pack(matrix), bias=torch.arange(24.0))
    x = torch.randn(2, 3, 96)
    got = layer(x)
    torch.testing.assert_close(got, x @ matrix.dequantised().T + torch.arange(24.0), atol=0.3, rtol=0.05)
    assert torch.equal(layer(x[0, 0]), got[0, 0])
    assert layer.half()(x.half()).dtype is torch.float16
    assert "in_features=96, out_features=24, layout=tensor_core" in repr(layer)


@pytest.mark.parametrize("shape", [(2, 48), (1, 192), ()])
def test_another_width_is_refused(shape: tuple[int, ...]) -> None:
    """Even where the values, put in rows anew, would be as many as the layer takes."""
    layer = TernaryLinear(TensorCoreTiles.pack(random_matrix(24, 96)))
    with pytest.raises(ConfigError, match=r"x has shape .*; this layer takes \(..., 96\)"):
        layer(torch.ones(shape))


def test_scales_stay_float32() -> None:
    layer = TernaryLinear(TensorCoreTiles.pack(random_matrix(24, 96, rows=(8, 16))), norm=torch.rand(96))
    before = layer.scales.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.scales, before)
    assert layer.norm is not None and layer.norm.dtype is torch.bfloat16
    layer.to("meta")
    assert layer.scales.device.type == "meta" and layer.scales.dtype is torch.float32


def test_a_layer_is_saved_and_loaded(tmp_path) -> None:
    layer, other = (TernaryLinear(Blocks16x32.pack(random_matrix(20, 64, seed))) for seed in (1, 2))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = torch.randn(3, 64)
    assert torch.equal(other(x), layer(x))


def test_a_compiled_layer_is_one_graph() -> None:
    layer = TernaryLinear(TensorCoreTiles.pack(random_matrix(20, 64)), norm=torch.rand(64))
    x = torch.randn(3, 64)
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))


def bit_linear(use_norm: bool) -> nn.Module:
    layer = BitLinear(96, 40, bias=True, dtype=torch.float32, use_rms_norm=use_norm)
    layer.weight = pack_weights(codes_of(40, 96))
    layer.weight_scale = torch.tensor([3.7])
    layer.bias = torch.randn(40)
    return layer


def auto_bit_linear(use_norm: bool, online: bool = False) -> nn.Module:
    layer = AutoBitLinear(96, 40, bias=False, online_quant=online, use_rms_norm=use_norm)
    if online:
        nn.init.normal_(layer.weight)
    else:
        layer.weight.data = codes_of(40, 96).float()
        layer.weight_scale = torch.tensor([0.31])
    return layer


@pytest.mark.parametrize("use_norm", [False, True])
@pytest.mark.parametrize("kind", ["BitLinear divides", "AutoBitLinear multiplies", "AutoBitLinear of masters"])
def test_transformers_layers_are_replaced_by_their_own_convention(kind: str, use_norm: bool) -> None:
    """Their float32 arithmetic is near ours, whose sums are exact; a wrong convention is off by a factor."""
    torch.manual_seed(0)
    theirs = (
        bit_linear(use_norm) if kind.startswith("Bit") else auto_bit_linear(use_norm, online=kind.endswith("masters"))
    )
    if use_norm:
        theirs.rms_norm.weight.data = torch.rand(96) + 0.5
    model = nn.ModuleDict({"layer": theirs})
    x = torch.randn(4, 7, 96)
    want = theirs(x)
    assert replace_linears(model) == ["layer"]
    assert isinstance(model["layer"], TernaryLinear)
    torch.testing.assert_close(model["layer"](x), want, rtol=1e-4, atol=1e-4 * float(want.detach().abs().max()))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_a_whole_model_keeps_its_logits() -> None:
    """Beside the same model with transformers' own layers, which quantise activations the same way."""
    ours, theirs = tiny_llama(), tiny_llama()
    for name, module in list(theirs.model.named_modules()):
        if isinstance(module, nn.Linear):
            layer = AutoBitLinear(module.in_features, module.out_features, bias=False, online_quant=True)
            layer.weight = module.weight
            theirs.model.set_submodule(name, layer)
    names = replace_linears(ours, masters=True, layout=Blocks16x32)
    assert len(names) == 14 and not any("lm_head" in name for name in names)
    ids = torch.arange(24).view(1, -1) % 97
    with torch.no_grad():
        got, want = ours(ids).logits, theirs(ids).logits
    assert float((got - want).norm() / want.norm()) < 2e-2  # a value at a half now and then rounds the other way
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.95


def test_a_model_without_ternary_layers_is_left_alone() -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match=r"no linear layer of the model is ternary.*masters=True"):
        replace_linears(model)
    assert not any(isinstance(module, TernaryLinear) for module in model.modules())


@pytest.mark.parametrize("masters", [False, True])
def test_a_layer_of_two_names_stays_one_and_one_without_weights_is_left_alone(masters: bool) -> None:
    shared, empty = nn.Linear(64, 64, bias=False), nn.Linear(64, 0)
    shared.weight.data = codes_of(64, 64).float()
    model = nn.Sequential(shared, nn.Sequential(shared), empty)
    assert replace_linears(model, masters=masters) == ["0", "1.0"]
    assert isinstance(model[0], TernaryLinear) and model[0] is model[1][0]
    assert model[2] is empty


def test_expanded_ternary_weights_are_recognised() -> None:
    """As of a checkpoint that somebody expanded to bf16; the ordinary layer beside it stays."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8))
    model[0].weight.data = codes_of(32, 64).float() * 0.125
    x = torch.randn(2, 64)
    want = model(x)
    assert replace_linears(model) == ["0"]
    torch.testing.assert_close(model(x), want, atol=0.05, rtol=0.1)
