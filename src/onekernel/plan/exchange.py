"""The exchange on the CPU: words that carry a value and a tag, as all CTAs see them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onekernel.errors import PlanError

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


def bf16_to_float(bits: npt.NDArray[np.uint16]) -> F32:
    """Return the values of bf16 numbers, given as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values: F32) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16, to nearest and ties to even, and return the bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def round_bf16(values: F32) -> F32:
    """Round float32 to the nearest bf16, kept as float32."""
    return bf16_to_float(float_to_bf16(values))


@dataclass(frozen=True, slots=True)
class Wait:
    """Words a CTA must see with `tag` before it goes on; `in_word` to `in_word + words - 1`."""

    word: int
    words: int
    tag: int


@dataclass(slots=True)
class Exchange:
    """Tagged words, all 0 at first. Every access is noted in `trace` if there is one."""

    words: int
    values: U32 = field(init=False)
    tags: U32 = field(init=False)
    trace: list[tuple[str, int, int, int]] | None = None
    """("take" or "give", first word, words, tag)."""

    def __post_init__(self) -> None:
        self.values, self.tags = np.zeros(self.words, np.uint32), np.zeros(self.words, np.uint32)

    def ready(self, wait: Wait) -> bool:
        """Return whether all words carry the tag; raises PlanError if there are no such words."""
        self._check(wait.word, wait.words)
        return bool((self.tags[wait.word : wait.word + wait.words] == wait.tag).all())

    def take(self, wait: Wait) -> U32:
        """Return the values of words that are ready."""
        if not self.ready(wait):
            raise PlanError(f"words {wait.word} to {wait.word + wait.words - 1} do not carry tag {wait.tag}")
        self._note("take", wait.word, wait.words, wait.tag)
        return self.values[wait.word : wait.word + wait.words].copy()

    def give(self, word: int, values: U32, tag: int) -> None:
        """Publish values from `word` on; raises PlanError outside the exchange."""
        self._check(word, len(values))
        self._note("give", word, len(values), tag)
        self.values[word : word + len(values)] = values
        self.tags[word : word + len(values)] = tag

    def give_bf16(self, word: int, values: F32, tag: int) -> None:
        """Publish an even number of float32 values, rounded to bf16, two a word."""
        self.give(word, float_to_bf16(values).view(np.uint32), tag)

    def _check(self, word: int, words: int) -> None:
        if word < 0 or words < 0 or word + words > self.words:
            raise PlanError(f"words {word} to {word + words - 1} lie outside the exchange of {self.words} words")

    def _note(self, what: str, word: int, words: int, tag: int) -> None:
        if self.trace is not None:
            self.trace.append((what, word, words, tag))
