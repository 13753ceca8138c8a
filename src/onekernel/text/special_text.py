"""The text of special tokens inside content, kept from becoming special tokens.

A chat template is one program over messages, and its output one string in which the template's own `<|im_end|>` and a
user's look the same. So the user's are disguised before rendering and undisguised after the template's have been found:

1. In every string of the messages, tools and options, each special token's text gets another first character: a
   private-use one that occurs nowhere in the request. Lengths, white space and everything else stay, so a template can
   trim, slice, split or dump content as before. Strings that were changed compare as if they were not
   (`_disguised_type`), so `'</think>' in content` still works where `</think>` is a special token.
2. What the rendered prompt then holds of special tokens' text is the template's. Each becomes an alias: a further
   private-use character, which a copy of the tokenizer knows as an added token with the original's flags, and which
   knows the original only as plain text. The disguises are taken off.
3. One call encodes it all, so normaliser, pre-tokenizer and the space SentencePiece puts before a text act as ever;
   the ids of aliases are replaced by those of the tokens they stand for.

No character that came from content can thus become a special token, whatever the template does with it. Added tokens
that are not special, such as Qwen's <tool_call>, stay tokens wherever they stand, as in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from onekernel.text.token_bytes import TokenBytes

Look = Callable[[str], None]
"""Is shown a text before it is encoded, and may refuse it by an exception."""


def encode(backend: Backend, text: str) -> list[int]:
    """Return the ids of a text, and nothing put round it.

    A batch of one, because that lets other threads run meanwhile: a text of megabytes takes seconds.
    """
    ids: list[int] = backend.encode_batch([text], add_special_tokens=False)[0].ids
    return ids


class SpecialText:
    """Finds the text of a tokenizer's special tokens, and encodes text without making them of it."""

    def __init__(self, backend: Backend, tokens: TokenBytes, special_ids: frozenset[int], vocab_limit: int) -> None:
        self._backend = backend
        self._tokens = tokens
        self._ids = special_ids
        self._added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._id_of = {self._added[i].content: i for i in special_ids if i in self._added}
        # The library takes the longest of the tokens that start at one place; so does a pattern with the longest first.
        longest_first = sorted(self._id_of, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # Ids unused below the limit: the library numbers added tokens from the vocabulary's size, so an alias could get
        # the id of a token above a gap; `_copy` fills the gaps first.
        self._gaps = vocab_limit - backend.get_vocab_size(with_added_tokens=True)
        self._plain, _ = self._copy({}, [])
        normalized = any(self._added[i].normalized for i in self._id_of.values())
        self._normalizer = backend.normalizer if normalized else None

    def occurs_in(self, value: Any) -> bool:
        """Return whether a string anywhere in the value holds a special token's text, as it is or normalised."""
        for text in _strings(value):
            if self._pattern.search(text):
                return True
            if self._normalizer is not None and self._pattern.search(self._normalizer.normalize_str(text)):
                return True
        return False

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` with special tokens' text as plain text."""
        return self._without_merged(encode(self._plain, text))

    def encode_rendered(
        self, render: Callable[[Callable[[Any], Any]], str], content: Any, look: Look = lambda text: None
    ) -> list[int]:
        """Return the ids of what `render` makes, in which nothing from `content` becomes a special token.

        `render` is called with a function that disguises a value; it passes all content through that.
        """
        free = _unused([*_strings(content), *self._id_of])
        stand_ins = {text[0]: next(free) for text in self._id_of if text}
        rendered = render(_Disguise(self._pattern, stand_ins))
        free = _unused([rendered, *self._id_of, *stand_ins.values()])
        aliases = {text: next(free) for text in set(self._pattern.findall(rendered))}
        prompt = self._pattern.sub(lambda match: aliases[match[0]], rendered)
        for original, stand_in in stand_ins.items():
            # A template may also have dumped content as ASCII JSON, where the stand-in is an escape sequence.
            prompt = prompt.replace(stand_in, original).replace(_json_escape(stand_in), original)
        look(prompt)
        backend, real_ids = self._copy(aliases, [next(free) for _ in range(self._gaps)])
        ids = self._without_merged(encode(backend, prompt))
        return [real_ids.get(token_id, token_id) for token_id in ids]

    def _copy(self, aliases: Mapping[str, str], fillers: list[str]) -> tuple[Backend, dict[int, int]]:
        """Return a tokenizer on the same model to which special tokens' text is plain, and the ids of its aliases."""
        backend = Backend(self._backend.model)  # shares the vocabulary: 0.2 ms
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        # In the order of their ids, so that those outside the model's vocabulary get the same ones again.
        for special, tokens in groupby(self._added.items(), lambda item: item[0] in self._ids):
            add = backend.add_special_tokens if special else backend.add_tokens
            add([token for _, token in tokens])
        backend.encode_special_tokens = True
        backend.add_tokens([AddedToken(filler, normalized=False) for filler in fillers])
        backend.add_tokens([_alias(self._added[self._id_of[text]], name) for text, name in aliases.items()])
        real = {name: self._id_of[text] for text, name in aliases.items()}
        added = backend.get_added_tokens_decoder()
        return backend, {i: real[token.content] for i, token in added.items() if token.content in real}

    def _without_merged(self, ids: list[int]) -> list[int]:
        """Spell out special tokens that the model itself has put together, as SentencePiece's merges do with </s>."""
        if self._ids.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for token_id in ids:
            spelled += self._tokens.spell(self._added[token_id].content) if token_id in self._ids else [token_id]
        return spelled


class _Disguise:
    """Gives special tokens' text in the strings of a nested value another first character."""

    def __init__(self, pattern: re.Pattern[str], stand_ins: Mapping[str, str]) -> None:
        self._pattern = pattern
        self._stand_ins = stand_ins
        self._type = _disguised_type(self._text)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            text = self._text(value)
            return value if text == value else self._type(text)
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        while self._pattern.search(text):  # again: one token's text can overlap the next one's
            text = self._pattern.sub(lambda match: self._stand_ins[match[0][0]] + match[0][1:], text)
        return text


_LOOKING = ("__contains__", "__eq__", "__ne__", "count", "endswith", "find", "index", "rfind", "rindex", "startswith")
_CUTTING = ("__getitem__", "lstrip", "removeprefix", "removesuffix", "replace", "rstrip", "strip")
_SPLITTING = ("partition", "rpartition", "rsplit", "split", "splitlines")


def _disguised_type(disguise: Callable[[str], str]) -> type[str]:
    """Return a str type that disguises what it is compared with, and whose parts are of that type too."""

    def wrap(value: Any, change: Callable[[str], str]) -> Any:
        if type(value) is str:
            return change(value)
        return type(value)(wrap(item, change) for item in value) if isinstance(value, (list, tuple)) else value

    def method(name: str) -> Callable[..., Any]:
        original = getattr(str, name)

        def call(self: str, *args: Any, **kwargs: Any) -> Any:
            return wrap(original(self, *(wrap(arg, disguise) for arg in args), **kwargs), disguised)

        return call

    # __hash__ goes when __eq__ is replaced; __str__ keeps the type through jinja2's filters, which call str().
    members: dict[str, Any] = {"__hash__": str.__hash__, "__str__": lambda self: self}
    members |= {name: method(name) for name in (*_LOOKING, *_CUTTING, *_SPLITTING)}
    disguised = type("_Disguised", (str,), members)
    return disguised


def _alias(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _unused(texts: Iterable[str]) -> Iterator[str]:
    """Yield private-use characters (plane 16) that are in none of the texts, not even as JSON escapes."""
    text = "\0".join(texts)
    return (c for c in map(chr, range(0x100000, 0x10FFFE)) if c not in text and _json_escape(c) not in text)


def _json_escape(character: str) -> str:
    return json.dumps(character)[1:-1]
