"""Text <-> token ids of one model: prompts, chats, and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from onekernel.errors import ModelError, TemplateError
from onekernel.text import gguf_vocab, hf_vocab
from onekernel.text.chat_template import ChatTemplate
from onekernel.text.fewest_tokens import FewestTokens
from onekernel.text.special_text import SpecialText, encode
from onekernel.text.thinking import ThinkingSplitter, find_tags
from onekernel.text.token_bytes import TokenBytes
from onekernel.text.vocab import Vocab, placeholder

CheckLength = Callable[[int], None]
"""Is told how many tokens a text has at least, and may refuse it by an exception."""


def _any_length(fewest: int) -> None:
    pass


class Tokenizer:
    """The tokenizer of a model. Every method may be called from any thread.

    `config` and `generation_config` are the model's settings by Hugging Face's names; only `bos_token_id` and
    `eos_token_id` are read. Raises ModelError if the vocabulary's decoder is of an unsupported kind or an
    `eos_token_id` is no id.
    """

    def __init__(self, vocab: Vocab, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
        backend = vocab.backend
        self._backend = backend
        self.special_tokens = dict(vocab.special_tokens)
        """Texts by name (`bos_token`, `eos_token`, ...): what a chat template sees."""
        self.chat_template = ChatTemplate(vocab.chat_templates) if vocab.chat_templates else None
        self.vocab_limit = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The largest id with a token, plus one; a model's rows from there on are padding and must not be sampled."""
        self.bos_token_id = _first_id(self._id_of("bos_token"), config.get("bos_token_id"))
        self.eos_token_ids = vocab.eos_token_ids | _ids(config) | _ids(generation_config)
        """Every id that ends an answer: of config.json, generation_config.json and the tokenizer itself."""
        self.tokens = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        named = set(self.special_tokens.values())
        special_ids = {i for i, token in added.items() if token.special or token.content in named}
        self._special = SpecialText(backend, self.tokens, frozenset(special_ids), self.vocab_limit)
        self._thinking_tags = find_tags("\n".join(self.chat_template.sources.values())) if self.chat_template else None
        tags = (self._thinking_tags.open, self._thinking_tags.close) if self._thinking_tags else ()
        self.skipped_token_ids = frozenset(i for i in special_ids if added[i].content not in tags)
        """Special tokens, which text leaves out; not those that open and close thinking, which the splitter needs."""
        self._before, self._after = _frame(backend)
        self.fewest_tokens = FewestTokens(backend, self.tokens, self.vocab_limit)
        """Tells of a long text how many tokens it has at least, without encoding it."""

    @classmethod
    def from_directory(cls, path: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> Tokenizer:
        """Read a Hugging Face directory; raises ModelError if tokenizer.json is missing or damaged."""
        return cls(hf_vocab.read_directory(path), config, generation_config)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], config: Mapping[str, Any], generation_config: Mapping[str, Any]
    ) -> Tokenizer:
        """Build from a GGUF file's key/value pairs; raises ModelError if they are unsupported or inconsistent."""
        return cls(gguf_vocab.read_metadata(metadata), config, generation_config)

    @classmethod
    def placeholder(cls, vocab_size: int) -> Tokenizer:
        """Return a tokenizer for random weights: its words are the ids, `"7 12"` <-> [7, 12]; other words are 0."""
        return cls(placeholder(vocab_size), {}, {})

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool, check_length: CheckLength = _any_length
    ) -> list[int]:
        """Return the ids of a text.

        `add_special_tokens` puts round it what the model's post-processor does, such as a BOS. With `parse_special`
        text such as `<|im_end|>` becomes that token, without it stays plain text. check_length: is told how many tokens
        the text has at least before it is encoded, and may raise.
        """
        text = _well_formed(text)
        check_length(self.fewest_tokens(text))
        if parse_special:
            ids = encode(self._backend, text)
        else:
            ids = self._special.encode_plain(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_prompt(self, text: str, *, check_length: CheckLength = _any_length) -> list[int]:
        """Return the ids of a text to be continued: one BOS if the model wants one, and never an EOS at the end.

        `check_length` as for `encode`.
        """
        ids = self.encode(text, add_special_tokens=False, parse_special=True, check_length=check_length)
        if ids[: len(self._before)] == self._before:
            return ids
        return [*self._before, *ids]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        parse_special_in_content: bool = False,
        check_length: CheckLength = _any_length,
        **options: Any,
    ) -> list[int]:
        """Return the ids of a chat, rendered by the model's template; `options` go to `ChatTemplate.render`.

        Nothing is added to what the template writes: a BOS is there once if the template writes it. Special tokens'
        text inside messages, tools and options is plain text unless `parse_special_in_content` (`special_text` tells
        how); where there is none, the ids are those of transformers' `apply_chat_template`. Raises TemplateError if
        there is no template or it refuses the messages. `check_length` as for `encode`.
        """
        if self.chat_template is None:
            raise TemplateError(
                "the model has no chat template, so it does not say how messages become text; complete plain text "
                "instead (--raw), or save a template as chat_template.jinja beside the model's tokenizer.json"
            )
        template = self.chat_template

        def look(text: str) -> None:
            check_length(self.fewest_tokens(_well_formed(text)))

        # Options may replace bos_token and so on, as in transformers; then they are the caller's template text.
        names = {**self.special_tokens, **{k: v for k, v in options.items() if k in self.special_tokens}}
        content = {"messages": list(messages), **{k: v for k, v in options.items() if k not in names}}
        if parse_special_in_content or not self._special.occurs_in(content):
            prompt = template.render(**content, **names)
            look(prompt)
            return self.encode(prompt, add_special_tokens=False, parse_special=True)
        return self._special.encode_rendered(
            lambda disguise: _well_formed(template.render(**disguise(content), **names)), content, look
        )

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        The space that SentencePiece puts before a text is taken off again, unless the ids continue an earlier text.
        """
        skipped = self.skipped_token_ids if skip_special else frozenset()
        shown = (i for i in token_ids if i not in skipped)
        raw = b"".join(map(self.tokens.of, shown)) if continues else self.tokens.join(shown)
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may end inside a character; empty for an id without a token."""
        return self.tokens.of(token_id)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD for parts of characters."""
        return self.tokens.of(token_id).decode("utf-8", "replace")

    def thinking_splitter(self, prompt_ids: Sequence[int]) -> ThinkingSplitter | None:
        """Return a splitter for the answer to a chat prompt, None if the model's template knows no thinking."""
        if self._thinking_tags is None:
            return None
        return ThinkingSplitter.after_prompt(self._thinking_tags, self.decode(prompt_ids[-32:], skip_special=False))

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _frame(backend: Backend) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text."""
    encoding = backend.encode("a")
    ids: list[int] = encoding.ids
    text = [n for n, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    return (ids[: text[0]], ids[text[-1] + 1 :]) if text else (ids, [])


def _ids(settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the end-of-sequence ids of a settings file, where they are null, one id or a list."""
    value = settings.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"eos_token_id is {value!r}; it must be a token id or a list of them: fetch the file again")
    return frozenset(ids)


def _first_id(*candidates: Any) -> int | None:
    return next((candidate for candidate in candidates if isinstance(candidate, int)), None)


def _well_formed(text: str) -> str:
    r"""Return the text with unpaired surrogates, which JSON's \ud800 makes and no tokenizer takes, as U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
