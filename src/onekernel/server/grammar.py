"""Structured output: JSON schemas and grammars as constraints on the engine's choice of tokens, by llguidance.

What a grammar needs of the tokenizer, a trie of all its tokens, takes a second or two for a large vocabulary. It is
built by a thread of its own when the model has been loaded, not by the first request that needs it.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from threading import Thread
from typing import Any

import llguidance
import numpy as np
import torch

from onekernel.errors import ConfigError
from onekernel.server.api_error import bad_request
from onekernel.server.settings import ServerSettings
from onekernel.text.tokenizer import Tokenizer

COMPACT = {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}
"""What llguidance is told: JSON without white space, of which a small model would otherwise write without end."""


class Grammars:
    """Makes constraints for one model. vocab_size: the logits' width, which may be more than the tokenizer has ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._trie: Future[llguidance.LLTokenizer] = Future()
        Thread(target=self._build, args=(tokenizer,), name="onekernel-grammar", daemon=True).start()

    @property
    def ready(self) -> bool:
        """Whether the trie has been built."""
        return self._trie.done()

    def constraints(self, grammar: str, count: int, param: str) -> list[GrammarConstraint]:
        """Return `count` constraints of one grammar; waits for the trie. Raises ApiError 400 naming `param`."""
        matcher = llguidance.LLMatcher(self._trie.result(), grammar, log_level=0)
        if matcher.is_error():
            raise bad_request(
                f"{param} cannot be compiled: {matcher.get_error().strip():.500}", param, "unsupported_schema"
            )
        return [GrammarConstraint(matcher.deep_copy(), self._vocab_size) for _ in range(count)]

    def _build(self, tokenizer: Tokenizer) -> None:
        try:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
            ends = sorted(tokenizer.eos_token_ids)
            self._trie.set_result(llguidance.LLTokenizer(wrapper, eos_token=ends or None))
        except BaseException as error:
            self._trie.set_exception(error)


class GrammarConstraint:
    """The tokens a grammar allows next, as the engine asks for them. Serves one answer."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._allowed = np.zeros(vocab_size, dtype=bool)

    @property
    def done(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return self._matcher.is_stopped()

    def mask(self) -> torch.Tensor:
        """Return the allowed tokens, (vocab_size,) bool on the CPU; raises ConfigError if that is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        size = min(bits.size * 8, self._allowed.size)
        self._allowed[:size] = np.unpackbits(bits, count=size, bitorder="little")
        return torch.from_numpy(self._allowed)

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen; raises ConfigError if what it leads to is too complex."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        """Raise if the matcher gave up; it would say that it has stopped, as at the end of an answer."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]  # then comes the answer's text
            raise ConfigError(f"the schema or grammar is too complex to follow; use a simpler one. {reason:.200}")


class AfterThinking:
    """Another constraint, from the end of the thinking that the prompt has opened."""

    def __init__(self, constraint: GrammarConstraint, tokenizer: Tokenizer, close_tag: str) -> None:
        self._constraint = constraint
        self._tokenizer = tokenizer
        self._close_tag = close_tag.encode()
        self._tail: bytes | None = b""

    @property
    def done(self) -> bool:
        """Whether the text after the thinking is complete."""
        return self._tail is None and self._constraint.done

    def mask(self) -> torch.Tensor | None:
        """Return None, everything is allowed, while the model thinks."""
        return self._constraint.mask() if self._tail is None else None

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""
        if self._tail is None:
            self._constraint.accept(token_id)
            return
        self._tail += self._tokenizer.token_bytes(token_id)
        self._tail = None if self._close_tag in self._tail else self._tail[-len(self._close_tag) :]


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of every token, and a way to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.skipped_token_ids | tokenizer.eos_token_ids
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids, default=None)
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [self._bytes(i, i in special) for i in range(tokenizer.vocab_limit)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the ids of a text."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def _bytes(self, token_id: int, special: bool) -> bytes:
        """Return a token's bytes; those of special ones begin with 0xFF, so that no text holds them."""
        raw = self._tokenizer.token_bytes(token_id)
        return b"\xff" + raw if special else raw


def response_grammar(response_format: dict[str, Any] | None, settings: ServerSettings) -> str | None:
    """Return the grammar of a response_format, None for text; raises ApiError naming what is wrong."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind != "json_schema":
        raise bad_request(
            f"response_format.type is {kind!r:.80}; it must be text, json_object or json_schema", "response_format"
        )
    wrapped = response_format.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if schema is None:
        raise bad_request("response_format.json_schema.schema is missing", "response_format")
    check_schema(schema, "response_format.json_schema.schema", settings)
    return json_grammar(schema)


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of compact JSON that meets a schema."""
    return f"start: %json {json.dumps({**schema, **COMPACT})}"


def check_schema(schema: Any, param: str, settings: ServerSettings) -> None:
    """Raise ApiError if a schema is no object, too large or too deep."""
    if not isinstance(schema, dict):
        raise bad_request(f"{param} is not an object", param)
    depth = _depth(schema, settings.max_schema_depth)
    if depth > settings.max_schema_depth:
        raise bad_request(f"{param} is nested more than {settings.max_schema_depth} deep", param, "schema_too_large")
    size = len(json.dumps(schema))
    if size > settings.max_schema_bytes:
        raise bad_request(
            f"{param} has {size} bytes; at most {settings.max_schema_bytes} are allowed", param, "schema_too_large"
        )


def _depth(value: Any, limit: int) -> int:
    """Return how deep objects and lists are nested, at most limit + 1."""
    depth, level = 0, [value]
    while level and depth <= limit:
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth
