"""What a chat does with each entry: ask the model, or carry out a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onekernel.cli.answer import AnswerPrinter
from onekernel.cli.console import Console
from onekernel.cli.conversation import Conversation
from onekernel.cli.report import timings_line
from onekernel.cli.session import answer
from onekernel.errors import ConfigError, ContextLengthError, MemoryLimitError, NumericError, TemplateError

if TYPE_CHECKING:
    from onekernel.config import SamplingParams
    from onekernel.engine.request import Completion
    from onekernel.llm import LLM

COMMANDS = {
    "/help": "this list",
    "/system [TEXT]": "set the system message, or show it",
    "/clear": "forget the conversation; the system message stays",
    "/regen": "answer the last question again, with another seed",
    "/undo": "take the last question and its answer back",
    "/save FILE": "write the conversation as JSON messages",
    "/exit": "leave (also Ctrl-D)",
}


class Dialogue:
    """A conversation with a loaded model on the terminal. A request that fails leaves the conversation as it was."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        params: SamplingParams,
        template: dict[str, Any],
        console: Console,
    ) -> None:
        self.conversation = conversation
        self._llm, self._params, self._template, self._console = llm, params, template, console
        self._saved: set[Path] = set()
        self._handlers: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/clear": self._clear,
            "/regen": self._regen,
            "/undo": self._undo,
            "/save": self._save,
        }

    def say(self, text: str) -> None:
        """Ask `text` and show the answer."""
        before = self.conversation.turns
        self.conversation.ask(text)
        if not self._answer(self._params):
            self.conversation.turns = before

    def command(self, line: str) -> bool:
        """Carry out a line that begins with /; return whether the chat goes on."""
        name, _, argument = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if handler := self._handlers.get(name):
            handler(argument.strip())
        else:
            self._console.error(f"there is no command {name}; /help lists them (as text it needs a space before it)")
        return True

    def _answer(self, params: SamplingParams) -> bool:
        """Answer the last question; return False if the request was refused or failed."""
        conversation, console = self.conversation, self._console
        try:
            completion = answer(self._llm, conversation.messages(), params, self._template, console, AnswerPrinter())
        except ContextLengthError as error:
            least = "at least " if error.at_least else ""
            console.error(
                f"the context is full: with this question the conversation has {least}{error.prompt_tokens} tokens and "
                f"the context {error.max_context}. /undo takes the last turn back, /clear starts anew"
                f"{self._larger_context(error.prompt_tokens)}"
            )
            return False
        except (NumericError, MemoryLimitError, TemplateError, ConfigError) as error:
            console.error(f"{error} (the conversation is as before)")
            return False
        conversation.reply(completion.text)
        self._explain_end(completion)
        console.detail(timings_line(completion, self._llm.loaded.load_s))
        return True

    def _explain_end(self, completion: Completion) -> None:
        console, used = self._console, completion.usage.total_tokens
        if completion.finish_reason == "cancelled":
            kept = "what there is of the answer is kept" if completion.text else "the question was left unanswered"
            console.note(f"[stopped: {kept}; /regen answers again]")
        elif completion.finish_reason == "length" and used >= self._llm.max_context:
            console.error(
                f"the context is full: {used} of {self._llm.max_context} tokens, and the answer was cut. /undo takes "
                f"the last turn back, /clear starts anew{self._larger_context(used)}"
            )
        elif completion.finish_reason == "length":
            console.note(f"[cut after {completion.usage.completion_tokens} tokens, the limit of --max-tokens]")

    def _larger_context(self, tokens: int) -> str:
        limit = self._llm.config.context_limit
        if limit > max(tokens, self._llm.max_context):
            return f"; start with --ctx-size N for more (the model allows {limit})"
        return f" (the model's own limit is {limit})"

    def _help(self, argument: str) -> None:
        width = max(map(len, COMMANDS))
        for name, meaning in COMMANDS.items():
            self._console.note(f"{name:{width}}  {meaning}")

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = argument
            self._console.note("[system message set; it holds from the next question on]")
        else:
            current = self.conversation.system
            self._console.note("[no system message of yours]" if current is None else current)

    def _clear(self, argument: str) -> None:
        self.conversation.clear()
        self._console.note("[conversation forgotten]")

    def _regen(self, argument: str) -> None:
        before = self.conversation.turns
        if not before:
            self._console.error("there is no question to answer again")
            return
        if self._params.resolve(self._llm.loaded.engine.generation_config).greedy:
            self._console.note("[sampling is greedy: the answer will be the same; start with --temp 0.7 for others]")
        self.conversation.reopen()
        if not self._answer(replace(self._params, seed=None)):
            self.conversation.turns = before

    def _undo(self, argument: str) -> None:
        if self.conversation.turns:
            self._console.note(f"[taken back: {self.conversation.undo().user.splitlines()[0]:.60}]")
        else:
            self._console.error("there is no turn to take back")

    def _save(self, argument: str) -> None:
        if not argument:
            self._console.error("/save needs a file name")
            return
        try:
            path = Path(argument).expanduser()
        except RuntimeError:  # ~user of whom nobody knows the home
            path = Path(argument)
        text = json.dumps(self.conversation.messages(), ensure_ascii=False, indent=1) + "\n"
        try:
            # A file of this chat may be brought up to date, any other is somebody's.
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._console.error(f"{path} exists; choose another name")
        except OSError as error:
            self._console.error(f"{path} cannot be written: {error.strerror}")
        else:
            self._saved.add(path)
            self._console.note(f"[saved {len(self.conversation.turns)} turns to {path}]")
