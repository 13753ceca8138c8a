"""SparseFFN alone and inside transformers' models: the same outputs on every way, and a report of what it saw."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from onekernel.errors import ConfigError
from onekernel.kernels.sparse_ffn import SLICED
from onekernel.ops.sparse_module import SparseFFN, replace_ffn
from onekernel.ops.sparse_route import Costs, Route
from onekernel.ops.sparse_router import Router
from onekernel.weights.neuron_rows import DownProjection
from tests.unit.ops.test_sparse import ROUNDED, dense, error, inputs, weights

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "hidden_act": "relu",
}
IDS = torch.arange(24).view(2, 12)


def module(hidden: int, inner: int, route: Route | None = None) -> SparseFFN:
    gate, up, down = weights(hidden, inner)
    return SparseFFN(gate, up, DownProjection.from_linear(down), route=route)


@pytest.mark.parametrize("hidden", [64, 100])
def test_it_measures_and_then_goes_the_fastest_way(hidden: int) -> None:
    ffn, x = module(hidden, 301), inputs(3, 7, hidden)
    inner, padded = ffn.up.shape
    ffn.router = Router(ffn.router._shape, padded, inner, costs=Costs(token_us=1e6, flop_per_us=1.0))
    gate, up, down = weights(hidden, 301)
    want = dense(x, gate, up, down, False)
    assert ffn.measured is None
    ways = []
    for _ in range(3):
        assert error(ffn(x), want) < ROUNDED
        assert ffn.measured is not None
        ways.append(ffn.measured.route.name)
    assert ways == ["dense", "gather", "gather"]
    assert ffn.measured.nonzero_fraction == pytest.approx(0.08, abs=0.05)


def test_hot_neurons_move_to_the_front_once_and_change_nothing() -> None:
    ffn, x = module(64, 320), inputs(400, 64)
    gate, up, down = weights(64, 320)
    ffn.gate[::3, 0] = 1.5
    gate[::3, 0] = 1.5  # a third of the neurons is active for most tokens
    costs = Costs(launch_us=0.0, token_us=0.0, column_us=6e-5, flop_per_us=3e5, gathered_token_us=1e9)
    ffn.router = Router(ffn.router._shape, 64, 320, costs=costs)
    want = dense(x, gate, up, down, False)
    pointer, ways = ffn.gate.data_ptr(), []
    for _ in range(3):
        assert error(ffn(x), want) < ROUNDED
        assert ffn.measured is not None
        ways.append(ffn.measured.route)
    assert [way.name for way in ways] == ["dense", "hot_cold", "hot_cold"]
    assert ffn.gate.data_ptr() == pointer
    assert (ffn.gate[: ways[-1].hot, 0] == 1.5).float().mean() > 0.8
    assert ffn.totals[SLICED] == 800


@pytest.mark.parametrize("route", [Route("gather"), Route("sliced", capacity=4), Route("hot_cold", hot=64)])
def test_a_forced_way_is_taken_from_the_first_call(route: Route) -> None:
    ffn, x = module(100, 301, route), inputs(9, 100)
    gate, up, down = weights(100, 301)
    assert error(ffn(x), dense(x, gate, up, down, False)) < ROUNDED
    assert ffn.measured is not None
    assert ffn.measured.route == route
    assert ffn(x[:0]).shape == (0, 100)


def llama(config: transformers.PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES)], ids=["llama", "qwen3"])
@pytest.mark.parametrize("route", [None, Route("sliced"), Route("hot_cold", hot=64)])
@torch.inference_mode()
def test_a_models_feed_forwards_are_replaced(config: transformers.PretrainedConfig, route: Route | None) -> None:
    model = llama(config)
    want = model(IDS).logits.double()
    replaced = replace_ffn(model, route=route)
    assert list(replaced.layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert [layer.measured for layer in replaced.report()] == [None, None]
    assert error(model(IDS).logits, want) < 0.03  # two layers of differently rounded bf16
    for layer in replaced.report():
        assert layer.measured is not None
        assert (layer.measured.rows, layer.measured.route) == (24, route or layer.measured.route)
        assert 0.2 < layer.measured.nonzero_fraction < 0.8
        assert layer.measured.fullest_row < 160


def test_a_fixed_way_copies_no_weights_but_the_down_projection() -> None:
    model = llama(LlamaConfig(**SIZES))
    before = [layer.mlp.gate_proj.weight.data_ptr() for layer in model.model.layers]
    replace_ffn(model, route=Route("sliced"))
    assert [layer.mlp.gate.data_ptr() for layer in model.model.layers] == before


@torch.inference_mode()
def test_a_feed_forward_of_two_names_stays_one_and_the_old_one_keeps_its_order() -> None:
    old = llama(LlamaConfig(**SIZES)).model.layers[0].mlp
    model, x = torch.nn.ModuleDict({"a": old, "b": torch.nn.Sequential(old)}), inputs(5, 64)
    want = old(x)
    replaced = replace_ffn(model)
    assert list(replaced.layers) == ["a", "b.0"]
    assert isinstance(model["a"], SparseFFN) and model["a"] is model["b"][0]
    model["a"]._reorder(torch.arange(len(model["a"].up)).flip(0))
    assert error(model["a"](x), want.double()) < ROUNDED
    assert torch.equal(old(x), want)


def test_rows_that_the_caller_holds_keep_their_order() -> None:
    gate, up, down = weights(64, 320)
    rows = down.t().contiguous()
    given, before = (gate, up, rows), (gate.clone(), up.clone(), rows.clone())
    SparseFFN(gate, up, DownProjection.from_rows(rows))._reorder(torch.arange(320).flip(0))
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


def test_models_without_zeros_are_refused_and_left_as_they_were() -> None:
    silu = llama(LlamaConfig(**{**SIZES, "hidden_act": "silu"}))
    with pytest.raises(ConfigError, match=r'layers.0.mlp has the activation SiLU.*give activation="relu"'):
        replace_ffn(silu)
    biased = llama(LlamaConfig(**SIZES, mlp_bias=True))
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate_proj has a bias"):
        replace_ffn(biased)
    assert not any(isinstance(part, SparseFFN) for model in (silu, biased) for part in model.modules())
    with pytest.raises(ConfigError, match="Linear has no module with gate_proj"):
        replace_ffn(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="activation is 'gelu'; it must be relu or relu2"):
        replace_ffn(silu, activation="gelu")  # type: ignore[arg-type]
    replace_ffn(silu, activation="relu")
    assert isinstance(silu.model.layers[1].mlp, SparseFFN)
