"""One tree of errors, whose messages hold the numbers."""

from __future__ import annotations

import inspect

import pytest

from onekernel import errors
from onekernel.errors import ConfigError, ContextLengthError, MemoryLimitError, OnekernelError, TemplateError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_ours_and_explains_itself(kind: type[Exception]) -> None:
    assert issubclass(kind, OnekernelError)
    assert kind.__doc__


@pytest.mark.parametrize("kind", [ConfigError, ContextLengthError, TemplateError])
def test_mistakes_in_an_argument_are_also_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, ValueError)


def test_a_context_that_is_too_small_names_the_flag_that_helps() -> None:
    error = ContextLengthError(prompt_tokens=9000, max_context=8192, model_limit=32768)
    assert (error.prompt_tokens, error.max_context, error.model_limit) == (9000, 8192, 32768)
    assert "9000 tokens" in str(error) and "--ctx-size 9001 or more (the model allows 32768)" in str(error)


def test_of_a_prompt_that_was_not_encoded_only_the_least_is_known() -> None:
    message = str(ContextLengthError(9000, max_context=8192, model_limit=32768, at_least=True))
    assert "at least 9000 tokens" in message and "9001" not in message
    assert "shorten the prompt, or start with a larger --ctx-size (the model allows 32768)" in message


@pytest.mark.parametrize("prompt_tokens", [8192, 100_000])
def test_a_prompt_longer_than_the_model_takes_can_only_be_shortened(prompt_tokens: int) -> None:
    message = str(ContextLengthError(prompt_tokens, max_context=8192, model_limit=8192))
    assert "shorten the prompt (the model's own limit is 8192)" in message and "--ctx-size" not in message


def test_too_little_memory_carries_its_numbers() -> None:
    error = MemoryLimitError("too big", needed_bytes=10, free_bytes=5, largest_context=64)
    assert (str(error), error.needed_bytes, error.free_bytes, error.largest_context) == ("too big", 10, 5, 64)
