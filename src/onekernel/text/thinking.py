"""The part of an answer that a thinking model writes between tags, told apart while it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The texts that open and close a model's thinking."""

    open: str
    close: str


KNOWN_TAGS = (
    ThinkingTags("<think>", "</think>"),
    ThinkingTags("[THINK]", "[/THINK]"),
    ThinkingTags("<thinking>", "</thinking>"),
    ThinkingTags("<thought>", "</thought>"),
    ThinkingTags("<seed:think>", "</seed:think>"),
    ThinkingTags("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def find_tags(template: str) -> ThinkingTags | None:
    """Return the thinking tags that a chat template's source mentions, None if it mentions none.

    Templates of thinking models cut old thinking out of the history, or open or close it in the generation prompt, so
    they name the closing tag.
    """
    return next((tags for tags in KNOWN_TAGS if tags.close in template), None)


class ThinkingSplitter:
    """Splits streamed text into (text, thinking) pieces; the tags themselves, whole or in part, are never shown.

    Line breaks right after a tag are layout and are dropped with it. `inside` says that the prompt has opened the tag.
    """

    def __init__(self, open_tag: str, close_tag: str, *, inside: bool = False) -> None:
        self._tags = {open_tag: True, close_tag: False}
        self._inside = inside
        self._after_tag = inside
        self._held = ""

    @classmethod
    def after_prompt(cls, tags: ThinkingTags, prompt: str) -> ThinkingSplitter:
        """Return a splitter for the answer to a rendered prompt, which may end with the opening tag."""
        return cls(tags.open, tags.close, inside=prompt.rstrip().endswith(tags.open))

    @property
    def inside(self) -> bool:
        """Whether the text is within the tags now."""
        return self._inside

    @property
    def close_tag(self) -> str:
        """The text that ends thinking."""
        return next(tag for tag, opens in self._tags.items() if not opens)

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Take a piece of text; return the pieces that are certain, none of them empty."""
        self._held += text
        pieces: list[tuple[str, bool]] = []
        while found := [(self._held.find(tag), tag) for tag in self._tags if tag in self._held]:
            start, tag = min(found)
            pieces += self._show(self._held[:start])
            self._held = self._held[start + len(tag) :]
            self._inside, self._after_tag = self._tags[tag], True
        certain = len(self._held) - self._partial_tag()
        pieces += self._show(self._held[:certain])
        self._held = self._held[certain:]
        return pieces

    def flush(self) -> list[tuple[str, bool]]:
        """End the text: return what was held back because it might have become a tag."""
        rest, self._held = self._held, ""
        return self._show(rest)

    def _show(self, text: str) -> list[tuple[str, bool]]:
        if self._after_tag:
            text = text.lstrip("\r\n")
            self._after_tag = not text
        return [(text, self._inside)] if text else []

    def _partial_tag(self) -> int:
        """Return the length of the longest tail that is a proper beginning of a tag."""
        sizes = range(min(len(self._held), max(map(len, self._tags)) - 1), 0, -1)
        return next((n for n in sizes if any(tag.startswith(self._held[-n:]) for tag in self._tags)), 0)
