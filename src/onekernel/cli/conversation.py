"""The state of a chat: a system message and turns. No model, no terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user said and what the model answered; None while there is no answer."""

    user: str
    answer: str | None = None


@dataclass(slots=True)
class Conversation:
    """A chat's history; `turns` is a tuple, so that keeping it and setting it back undoes anything.

    Only the last turn may be without an answer: refused, or stopped before its first word. It is never sent again.
    """

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def ask(self, text: str) -> None:
        """Begin a turn; an unanswered one before it is dropped."""
        answered = self.turns[:-1] if self.turns and self.turns[-1].answer is None else self.turns
        self.turns = (*answered, Turn(text))

    def reply(self, text: str) -> None:
        """Set the last turn's answer, complete or cut; without its thinking, which models do not want to see again."""
        self.turns = (*self.turns[:-1], replace(self.turns[-1], answer=text or None))

    def reopen(self) -> None:
        """Drop the last answer, so that its question can be asked again."""
        self.reply("")

    def undo(self) -> Turn:
        """Remove the last turn and return it; there must be one."""
        *kept, last = self.turns
        self.turns = tuple(kept)
        return last

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = ()

    def messages(self) -> list[dict[str, str]]:
        """Return the history as chat messages."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            if turn.answer is not None:
                found.append({"role": "assistant", "content": turn.answer})
        return found
