"""Values out of range are refused with the field, the value and the range; sizes follow from the dimensions."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from onekernel.config import (
    EngineConfig,
    ModelConfig,
    RopeScaling,
    Sampling,
    SamplingParams,
    context_tokens,
    defaults_from,
)
from onekernel.errors import ConfigError

SMOLLM2 = ModelConfig("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152, 8192, tie_word_embeddings=True)

NAN, INF = math.nan, math.inf
RANGES: dict[str, tuple[str, list[Any], list[Any]]] = {
    # field: what the message says, values refused, values taken
    "max_tokens": ("a whole number of at least 1", [0, -1, 2.0, "7", True, NAN], [1, 10**6]),
    "temperature": ("from 0 up to 100", [-0.1, 100.5, NAN, INF, "1", True], [0, 0.0, 1e-6, 1, 100]),
    "top_k": ("a whole number of at least 0", [0.5, -1, 40.0, "40", True, NAN], [0, 1, 10**6]),
    "top_p": ("above 0 up to 1", [0, 0.0, -0.5, 1.1, NAN, INF, True], [1e-9, 0.5, 1, 1.0]),
    "min_p": ("from 0 up to 1", [-0.1, 1.1, NAN, "0", False], [0, 0.05, 1]),
    "repetition_penalty": ("above 0 up to 10", [0, -1.0, 10.5, NAN, True], [0.5, 1, 10]),
    "presence_penalty": ("from -2 up to 2", [-2.1, 2.1, NAN, INF, True], [-2, 0, 2.0]),
    "frequency_penalty": ("from -2 up to 2", [-2.1, 2.1, NAN, -INF, True], [-2, 0, 2.0]),
    "seed": ("a whole number from 0 to 18446744073709551615", [-1, 2**64, 1.0, True], [0, 2**64 - 1]),
    "logprobs": ("a whole number from 0 to 20", [-1, 21, True, 1.5], [0, 20]),
}
REFUSED = [(name, value) for name, (_, refused, _) in RANGES.items() for value in refused]
TAKEN = [(name, value) for name, (_, _, taken) in RANGES.items() for value in taken]


@pytest.mark.complaint(
    "E2",
    file="config.py",
    old='_whole("top_k", self.top_k, 0, None)',
    new='_real("top_k", self.top_k, 0.0, 1e9)',
)
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_out_of_range_is_refused_with_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be {RANGES[name][0]}"


@pytest.mark.parametrize(("name", "value"), TAKEN)
def test_the_ends_of_a_range_belong_to_it(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logit_bias": {-1: 0.0}}, "a token id in logit_bias is -1; .* at least 0"),
        ({"logit_bias": {"5": 0.0}}, "a token id in logit_bias is '5'"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias of token 5 is 101\.0; it must be from -100 up to 100"),
        ({"logit_bias": {5: NAN}}, "logit_bias of token 5 is nan"),
        ({"stop": ("a", "")}, "a stop string is ''; give strings of at least one character"),
        ({"stop": (3,)}, "a stop string is 3"),
        ({"stop_token_ids": (-2,)}, "a stop token id is -2; .* at least 0"),
        ({"stop_token_ids": (True,)}, "a stop token id is True"),
    ],
)
def test_what_collections_may_hold(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong)


def test_collections_are_copied_and_one_stop_string_is_enough() -> None:
    bias, stops = {5: 1.0}, ["a", "b"]
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=[1, 2])  # type: ignore[arg-type]
    bias[6], stops[0] = 1.0, "z"
    assert params.stop == ("a", "b") and params.logit_bias == {5: 1.0} and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_neutral_values_if_nobody_says_anything() -> None:
    assert replace(SamplingParams().resolve({}), seed=0) == Sampling()
    assert Sampling().greedy and not Sampling().penalised


@pytest.mark.complaint("F4", file="config.py", old=" if getattr(self, name) is None}", new="}")
def test_the_request_wins_over_the_model_and_the_model_over_the_defaults() -> None:
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    assert defaults_from(file) == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    got = SamplingParams(top_p=0.3, top_k=0).resolve(file)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.3, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_temperature_in_the_request_decides_whether_to_sample(temperature: float) -> None:
    for file in ({"do_sample": True, "top_p": 0.9}, {"do_sample": False, "top_p": 0.9}):
        got = SamplingParams(temperature=temperature).resolve(file)
        assert got.greedy is (temperature == 0.0)
        assert (got.temperature, got.top_p, got.top_k) == ((0.7, 0.9, 50) if temperature else (0.0, 1.0, 0))


def test_greedy_models_keep_their_repetition_penalty_only() -> None:
    file = {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    assert defaults_from(file) == {"repetition_penalty": 1.1}
    assert SamplingParams().resolve(file).penalised


def test_a_bad_value_in_the_file_is_blamed_on_the_file() -> None:
    with pytest.raises(ConfigError, match=r"in the model's generation_config\.json: top_p is 1\.5"):
        SamplingParams().resolve({"do_sample": True, "top_p": 1.5})
    assert SamplingParams(top_p=0.5).resolve({"do_sample": True, "top_p": 1.5}).top_p == 0.5


@pytest.mark.complaint(
    "J2",
    file="config.py",
    old="temperature=_or(full.temperature, 0.0)",
    new="temperature=_or(full.temperature, 0.0) if full.seed is None else 0.0",
)
def test_a_seed_is_only_a_seed() -> None:
    file = {"do_sample": True, "temperature": 0.6}
    free, seeded = SamplingParams().resolve(file), SamplingParams(seed=7).resolve(file)
    assert seeded == replace(free, seed=7)
    assert SamplingParams(seed=0).resolve(file).seed == 0


def test_without_a_seed_each_request_gets_its_own() -> None:
    seeds = {SamplingParams().resolve({}).seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**64 for seed in seeds)


def test_fields_a_caller_may_set() -> None:
    assert {*RANGES, "logit_bias", "stop", "stop_token_ids", "ignore_eos"} == {
        field.name for field in fields(SamplingParams)
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a whole number of at least 1"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers is 2\.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads is 9, not a multiple of num_key_value_heads, 4"),
        ({"head_dim": 65}, "head_dim is 65; it must be even"),
        ({"head_dim": 258}, "head_dim is 258; .* at most 256"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; at most 1024 can be taken"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000; at most 1048576"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0\.0"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMOLLM2, **change)


def test_sizes_of_a_known_model() -> None:
    assert (SMOLLM2.q_size, SMOLLM2.kv_size) == (576, 192)
    assert SMOLLM2.parameters == 134_515_008
    assert replace(SMOLLM2, tie_word_embeddings=False).parameters == 134_515_008 + 49152 * 576
    assert SMOLLM2.parameters_read_per_token == 134_515_008 + 576
    assert SMOLLM2.kv_bytes_per_token() == 2 * 30 * 192 * 2
    wide = replace(SMOLLM2, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    biases = 576 + 2 * 192 + 576 + 2 * 1536 + 576 + 2 * 64
    assert wide.layer_parameters == SMOLLM2.layer_parameters + biases


@pytest.mark.parametrize(
    ("asked", "change", "expected"),
    [
        (None, {}, 8192),
        (None, {"max_position_embeddings": 131072}, 8192),
        (None, {"max_position_embeddings": 512}, 512),
        (0, {"max_position_embeddings": 131072}, 131072),
        (100, {}, 100),
        (0, {"rope_scaling": RopeScaling("linear", 4.0)}, 32768),
        (4096, {"sliding_window": 4096}, 4096),
    ],
)
def test_context_an_engine_allocates(asked: int | None, change: dict[str, Any], expected: int) -> None:
    assert context_tokens(asked, replace(SMOLLM2, **change)) == expected


def test_contexts_the_model_does_not_allow() -> None:
    with pytest.raises(ConfigError, match="8193 tokens was asked for; the model allows 8192"):
        context_tokens(8193, SMOLLM2)
    with pytest.raises(ConfigError, match=r"window of 4096 tokens.* use --ctx-size 4096 or less"):
        context_tokens(None, replace(SMOLLM2, sliding_window=4096))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_context": -1}, "max_context is -1; give 0 .* or at least 2"),
        ({"max_context": 1}, "max_context is 1"),
        ({"threads": 0}, "threads is 0; it must be a whole number from 1"),
        ({"slice_tokens": 0}, "slice_tokens is 0; it must be a whole number of at least 1"),
        ({"slice_tokens": None}, "slice_tokens is None"),
        ({"max_waiting": -1}, "max_waiting is -1; it must be a whole number of at least 0"),
        ({"kv_tokens": -1}, "kv_tokens is -1; it must be a whole number of at least 0"),
        ({"prefix_cache": 1}, "prefix_cache is 1; it must be true or false"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be auto, bfloat16 or float32"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be auto, reference or megakernel"),
        ({"sparse": "yes"}, "sparse is 'yes'; it must be auto, on or off"),
    ],
)
def test_engine_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 100_000},
        {"threads": True},
        {"threads": 1.5},
        {"max_context": 2.5},
        {"max_context": "8"},
        {"device": None},
        {"max_context": -1},
    ],
)
def test_engine_values_of_the_wrong_kind_are_refused_before_anything_runs(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"stop": 5}, {"stop": None}, {"stop_token_ids": 5}, {"logit_bias": 5}, {"ignore_eos": "x"}]
)
def test_sampling_values_of_the_wrong_kind_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)
