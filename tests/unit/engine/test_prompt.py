"""What may be handed in as a prompt, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onekernel.engine.prompt import encode, is_one_prompt
from onekernel.errors import ConfigError
from onekernel.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.placeholder(100)


@pytest.mark.parametrize("wrong", [None, 5, b"5", {"role": "user"}, {1, 2}, (n for n in range(3)), 1.5])
def test_what_is_no_prompt_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="a prompt is"):
        is_one_prompt(wrong)
    with pytest.raises(ConfigError, match="a prompt is"):
        encode(TOKENIZER, wrong, {})


def test_a_list_of_mixed_things_is_refused() -> None:
    with pytest.raises(ConfigError, match="a prompt is"):
        encode(TOKENIZER, [1, "two"], {})  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="a prompt is"):
        encode(TOKENIZER, [True, False], {})


def test_ids_and_text_go_on_a_chat_starts_anew() -> None:
    assert encode(TOKENIZER, [7, 12], {}).token_ids == (7, 12)
    assert encode(TOKENIZER, "7 12", {}).token_ids == (7, 12)
    assert encode(TOKENIZER, "7 12", {}).continues
    with pytest.raises(ConfigError, match="chat template"):
        encode(TOKENIZER, "7 12", {"enable_thinking": False})
