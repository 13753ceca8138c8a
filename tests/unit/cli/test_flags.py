"""Short words of llama.cpp and vLLM mean the same here, and a wrong value is named with its flag and range."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from onekernel.cli.flags import _NOT_FOR_TEMPLATES, engine_config, model_name, sampling_params
from onekernel.cli.main import build_parser
from onekernel.config import EngineConfig, SamplingParams
from onekernel.errors import ConfigError


def parse(*arguments: str, command: str = "generate") -> Any:
    return build_parser().parse_args([command, *arguments])


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        *((f"{flag} 7", "max_tokens", 7) for flag in ("-n", "--max-tokens", "--predict", "--n-predict")),
        ("-n -1", "max_tokens", None),
        *((f"{flag} 0.5", "temperature", 0.5) for flag in ("--temp", "--temperature")),
        ("--top-k 0", "top_k", 0),
        ("--top-p 0.9", "top_p", 0.9),
        ("--min-p 0.1", "min_p", 0.1),
        *((f"{flag} 1.1", "repetition_penalty", 1.1) for flag in ("--repeat-penalty", "--repetition-penalty")),
        ("--presence-penalty -1", "presence_penalty", -1.0),
        ("--frequency-penalty 0.5", "frequency_penalty", 0.5),
        ("--logit-bias 5=-100 --logit-bias 6=1.5", "logit_bias", {5: -100.0, 6: 1.5}),
        ("--seed 0", "seed", 0),
        ("--seed -1", "seed", None),
        ("--stop a --stop b", "stop", ("a", "b")),
        ("--ignore-eos", "ignore_eos", True),
    ],
)
def test_sampling_flags(arguments: str, field: str, value: object) -> None:
    params = sampling_params(parse("model", *arguments.split()))
    assert getattr(params, field) == value
    assert params == SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        *((f"{flag} 512", "max_context", 512) for flag in ("-c", "--ctx-size", "--max-model-len", "--max-context")),
        ("-c 0", "max_context", 0),
        *((f"{flag} 3", "threads", 3) for flag in ("-t", "--threads")),
        ("--device cpu", "device", "cpu"),
        ("--dtype bf16", "dtype", "bfloat16"),
        ("--dtype float", "dtype", "float32"),
        ("--backend reference", "backend", "reference"),
        ("--sparse off", "sparse", "off"),
    ],
)
def test_engine_flags(arguments: str, field: str, value: object) -> None:
    assert engine_config(parse("model", *arguments.split())) == EngineConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--slice-tokens 8", "slice_tokens", 8),
        ("--max-waiting 0", "max_waiting", 0),
        ("--kv-tokens 9000", "kv_tokens", 9000),
        ("--no-prefix-cache", "prefix_cache", False),
        ("-c 512", "prefix_cache", True),
    ],
)
def test_flags_of_who_shares_the_engine(arguments: str, field: str, value: object) -> None:
    assert getattr(engine_config(parse("model", *arguments.split(), command="serve")), field) == value


@pytest.mark.parametrize("flag", ["--slice-tokens 0", "--max-waiting -1", "--kv-tokens -1"])
def test_their_values_out_of_range_are_named_with_the_flag(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag.replace(' ', ' is ')}; it must be a whole number of at least"):
        engine_config(parse("model", *flag.split(), command="serve"))


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "info"])
def test_the_model_is_a_word_or_a_flag(command: str) -> None:
    for arguments in (["path"], ["-m", "path"], ["--model", "path"]):
        assert model_name(parse(*arguments, command=command)) == "path"
    for arguments in ([], ["path", "-m", "path"], [""]):
        with pytest.raises(ConfigError, match="model"):
            model_name(parse(*arguments, command=command))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--temp 101", "--temp is 101.0; it must be from 0 up to 100"),
        ("--top-k -1", "--top-k is -1; it must be a whole number of at least 0"),
        ("--top-p 0", "--top-p is 0.0; it must be above 0 up to 1"),
        ("-n 0", "--max-tokens is 0; it must be a whole number of at least 1"),
        ("--repetition-penalty 0", "--repeat-penalty is 0.0; it must be above 0 up to 10"),
        ("--logit-bias 5=101", "--logit-bias of token 5 is 101.0; it must be from -100 up to 100"),
        ("--temp nan", "--temp is nan; it must be from 0 up to 100"),
    ],
)
def test_a_value_out_of_range_is_named_with_flag_and_range(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sampling_params(parse("model", *arguments.split()))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-c 1", "--ctx-size is 1; a prompt token"),
        ("-c -5", "--ctx-size is -5; give 0"),
        ("-t 0", "--threads is 0; it must be a whole number from 1"),
        ("--dtype int3", "--dtype is 'int3'; it must be"),
        ("--backend fast", "--backend is 'fast'; it must be"),
    ],
)
def test_an_engine_value_out_of_range_is_named_with_its_flag(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine_config(parse("model", *arguments.split()))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--logit-bias", "5", "'5' is not ID=VALUE"),
        ("--chat-template-kwargs", "{", "'{' is not JSON"),
        ("--chat-template-kwargs", "[1]", "'[1]' is not a JSON object"),
        ("--chat-template-kwargs", '{"messages": 1}', "messages is no template's option"),
        ("--temp", "warm", "invalid float value: 'warm'"),
    ],
)
def test_a_value_of_the_wrong_form_is_a_usage_error(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("model", flag, value)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_words_are_not_guessed() -> None:
    """--max would be both --max-tokens and --max-context, and a new flag must not change what an old script means."""
    with pytest.raises(SystemExit):
        parse("model", "--presence", "1")


def test_names_of_our_own_parameters_are_no_options_of_a_template() -> None:
    from onekernel.llm import LLM
    from onekernel.text.tokenizer import Tokenizer

    own = {*inspect.signature(LLM.stream).parameters, *inspect.signature(Tokenizer.encode_chat).parameters}
    assert own - {"template", "options"} == _NOT_FOR_TEMPLATES
