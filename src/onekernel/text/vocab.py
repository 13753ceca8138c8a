"""What the readers of tokenizer files hand over, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from onekernel.text.token_bytes import METASPACE


@dataclass(frozen=True, slots=True)
class Vocab:
    """A ready `tokenizers` object and what its files say besides.

    `special_tokens` maps names such as `bos_token` to texts; `chat_templates` maps names such as `default` to sources.
    """

    backend: Backend
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def placeholder(vocab_size: int) -> Vocab:
    """Return a vocabulary whose words are the ids, for random weights without a tokenizer; other words are id 0."""
    words = {f"{METASPACE}{token_id}": token_id for token_id in range(vocab_size)}
    backend = Backend(WordLevel(words, unk_token=f"{METASPACE}0"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Vocab(backend)
