"""What `generate` and `chat` share: a loaded model, and an answer that is shown while it runs and stops on Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

from onekernel.cli.answer import AnswerPrinter
from onekernel.cli.console import Console
from onekernel.cli.flags import engine_config, model_name

if TYPE_CHECKING:
    from onekernel.config import SamplingParams
    from onekernel.engine.prompt import Prompt
    from onekernel.engine.request import Completion
    from onekernel.engine.stream import AnswerStream
    from onekernel.llm import LLM


def open_llm(args: argparse.Namespace, console: Console, **fixed: Any) -> LLM:
    """Load the model that the flags name; `fixed` engine settings win over flags.

    A command without flags about sharing answers one request at a time, which needs the KV cache of one.
    """
    if not hasattr(args, "kv_tokens"):
        fixed = {"kv_tokens": 0, **fixed}
    name, options = model_name(args), engine_config(args, **fixed)
    start = time.perf_counter()
    from onekernel.llm import LLM

    console.detail(f"import: {time.perf_counter() - start:.2f} s")
    return LLM(
        name,
        **asdict(options),
        revision=args.revision,
        load_format=args.load_format,
        listener=console.listener(),
    )


def answer(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    template: dict[str, Any],
    console: Console,
    printer: AnswerPrinter | None,
) -> Completion:
    """Return the answer, shown by `printer` while it comes; Ctrl-C ends it with finish_reason "cancelled"."""

    def progress(done: int, total: int) -> None:
        console.progress("reading the prompt", done, total)

    try:
        with cancel_on_interrupt() as watch, llm.stream(prompt, params, progress=progress, **template) as stream:
            watch(stream)
            for delta in stream:
                if printer is not None:
                    printer.push(delta)
            return stream.result()
    finally:
        console.clear_bar()
        if printer is not None:
            printer.end()


@contextmanager
def cancel_on_interrupt() -> Iterator[Callable[[AnswerStream], None]]:
    """Make the first Ctrl-C cancel the stream that is handed in, which then ends with what it has.

    It may come before there is a stream. A second one is KeyboardInterrupt.
    """
    pressed = False
    running: list[AnswerStream] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        for stream in running:
            stream.cancel()

    def watch(stream: AnswerStream) -> None:
        running.append(stream)
        if pressed:
            stream.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, previous)
