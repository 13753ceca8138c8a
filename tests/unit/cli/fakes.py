"""A model that answers by script instead of `onekernel.llm.LLM`; run as a program it is `onekernel` with that model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from onekernel.cli.main import main
from onekernel.config import ModelConfig, SamplingParams
from onekernel.engine.request import CancelToken, Completion, Delta, FinishReason, Timings, TokenLogprob, Usage
from onekernel.engine.stream import AnswerStream, Submit

CONFIG = ModelConfig("LlamaForCausalLM", 64, 128, 2, 4, 2, 16, 300, 4096)


@dataclass
class Script:
    """One answer: pieces of text, or pieces of thinking (marked by a leading '~'), or an error instead of a piece."""

    pieces: Sequence[str | BaseException] = ("Hello", " world")
    delay_s: float = 0.0
    finish: FinishReason = "stop"
    completion_tokens: int | None = None


@dataclass
class FakeLLM:
    """Answers each request by the next script, the last one again and again; notes what it was asked."""

    scripts: list[Script] = field(default_factory=lambda: [Script()])
    chat_template: object | None = "a template"
    max_context: int = 100
    generation_config: dict[str, Any] = field(default_factory=dict)
    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams, dict[str, Any]]] = field(default_factory=list)
    closed: bool = False

    def __call__(self, model: str, **options: Any) -> FakeLLM:
        """Stand for the class `LLM`."""
        self.made.append((model, options))
        options["listener"].note("device cpu (fake)")
        options["listener"].detail("weights: 0.10 s")
        options["listener"].progress("loading tensors", 1, 2)
        options["listener"].progress("loading tensors", 2, 2)
        return self

    @property
    def config(self) -> ModelConfig:
        return CONFIG

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(chat_template=self.chat_template)

    @property
    def loaded(self) -> Any:
        backend = SimpleNamespace(name="reference", device="cpu")
        engine = SimpleNamespace(backend=backend, generation_config=self.generation_config)
        settings = SimpleNamespace(name="fake-model")
        return SimpleNamespace(engine=engine, settings=settings, dtype=torch.bfloat16, load_s=1.25)

    def stream(
        self, prompt: Any, params: SamplingParams, *, progress: Callable[[int, int], None], **template: Any
    ) -> AnswerStream:
        self.asked.append((prompt, params, template))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if script.pieces and isinstance(script.pieces[0], Exception):
            raise script.pieces[0]
        return AnswerStream(_submit(script, params, progress))

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


def _submit(script: Script, params: SamplingParams, progress: Callable[[int, int], None]) -> Submit:
    def submit(deliver: Callable[[Any], None]) -> CancelToken:
        cancel = CancelToken()

        def work() -> None:
            progress(5, 10)
            progress(10, 10)
            parts: dict[bool, str] = {False: "", True: ""}
            ids: list[int] = []
            for piece in script.pieces:
                if isinstance(piece, BaseException):
                    deliver(piece)
                    return
                if cancel.is_set:
                    break
                ids.append(7 + len(ids))
                thinking = piece.startswith("~")
                text = piece.removeprefix("~")
                parts[thinking] += text
                deliver(Delta(text, (ids[-1],), thinking=thinking))
                time.sleep(script.delay_s)
            reason: FinishReason = "cancelled" if cancel.is_set else script.finish
            deliver(Delta("", finish_reason=reason))
            count = len(ids) if script.completion_tokens is None else script.completion_tokens
            deliver(
                Completion(
                    text=parts[False],
                    thinking=parts[True],
                    token_ids=tuple(ids),
                    finish_reason=reason,
                    usage=Usage(11, count),
                    timings=Timings(1.0, 50.0, 95.0, 100.0, 10, count),
                    seed=123 if params.seed is None else params.seed,
                    logprobs=None if params.logprobs is None else (TokenLogprob(7, "é", (195, 169), -0.5, ()),),
                )
            )

        threading.Thread(target=work, daemon=True).start()
        return cancel

    return submit


def run(llm: FakeLLM, arguments: Sequence[str]) -> int:
    """Run the command line on this model in the present process."""
    import onekernel.llm

    real = onekernel.llm.LLM
    onekernel.llm.LLM = llm  # type: ignore[assignment, misc]
    try:
        return main(arguments)
    finally:
        onekernel.llm.LLM = real  # type: ignore[misc]


if __name__ == "__main__":
    slow = Script(tuple(f" word{number}" for number in range(100)), delay_s=0.1)
    sys.exit(run(FakeLLM([slow]), sys.argv[1:]))
