"""What the readers of tokenizer files hand over, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True, slots=True)
class Vocab:
    """A ready `tokenizers` object and what its files say besides.

    `special_tokens` maps names such as `bos_token` to texts; `chat_templates` maps names such as `default` to sources.
    """

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
