"""What a caller hands in (text, token ids or messages) -> token ids and how to read the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from onekernel.errors import ConfigError
from onekernel.text.thinking import ThinkingSplitter
from onekernel.text.tokenizer import CheckLength, Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text (taken as it is), token ids, or chat messages (rendered with the model's template)."""


def is_one_prompt(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is a single prompt rather than a list of them; raises ConfigError if it is neither."""
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise ConfigError(_KINDS.format(prompt))
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], (int, Mapping)))


_KINDS = "a prompt is a string, a list of token ids or a list of messages, not {!r:.80}"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as ids, and how to read its answer: with a splitter if it may think aloud."""

    token_ids: tuple[int, ...]
    splitter: ThinkingSplitter | None = None
    continues: bool = True
    """Whether the answer goes on with the prompt's text, so that its leading space counts; a chat's starts anew."""


def encode(
    tokenizer: Tokenizer, prompt: Prompt, template: Mapping[str, Any], check_length: CheckLength = lambda fewest: None
) -> Encoded:
    """Return a prompt's token ids and how to read its answer.

    check_length: is told how many tokens a long text has at least, before it is encoded, and may refuse it.
    Raises ConfigError for something that is no prompt, TemplateError from the template.
    """
    is_one_prompt(prompt)
    if isinstance(prompt, str):
        if template:
            raise ConfigError(
                f"{', '.join(template)} go to the chat template, but the prompt is plain text; give messages"
            )
        return Encoded(tuple(tokenizer.encode_prompt(prompt, check_length=check_length)))
    if all(isinstance(part, Mapping) for part in prompt) and prompt:
        messages = cast("Sequence[Message]", prompt)
        ids = tuple(tokenizer.encode_chat(messages, check_length=check_length, **template))
        return Encoded(ids, tokenizer.thinking_splitter(ids), continues=False)
    if all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        return Encoded(tuple(cast("Sequence[int]", prompt)))
    raise ConfigError(_KINDS.format(prompt))
