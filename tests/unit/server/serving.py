"""Servers for tests: an app on a loopback port in a thread, a tiny random model, and a model that answers by script."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette

from onekernel import LLM
from onekernel.config import ModelConfig, Sampling
from onekernel.engine.backend import DecodedToken, SequenceState
from onekernel.engine.request import CancelToken
from onekernel.server.protocol import GuardedProtocol
from onekernel.text.tokenizer import Tokenizer
from tests.tiny_llama import write_tiny
from tests.unit.engine.conftest import Script, ScriptedBackend, ScriptedSequence
from tests.unit.text.families import FAMILIES

START_S = 30.0


def write_chatting(folder: Path) -> Path:
    """Write a tiny random model's config and a tokenizer with a chat template."""
    FAMILIES["qwen"].write(folder, "qwen_tools")
    return write_tiny(folder, vocab_size=704, max_position_embeddings=4096, torch_dtype="float32")


def tiny_llm(folder: Path, **options: Any) -> LLM:
    """Load that model."""
    return LLM(str(write_chatting(folder)), device="cpu", load_format="dummy", threads=1, **options)


@dataclass
class TextBackend(ScriptedBackend):
    """Answers every request with `text`, and what tokens cost; notes the prompts. With `error` it fails at the end."""

    script: Script = field(default_factory=lambda: Script(()))
    text: str = "Hello"
    tokenizer: Tokenizer | None = None
    token_s: float = 0.0
    error: BaseException | None = None
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    endless: bool = False

    def open(self, prompt: Any, total_tokens: int) -> SequenceState:
        self.prompts.append(tuple(prompt))
        return super().open(prompt, total_tokens)

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        assert isinstance(sequence, ScriptedSequence)
        assert self.tokenizer is not None
        self.samplings.append(sampling)
        ids = self.tokenizer.encode(self.text, add_special_tokens=False, parse_special=True)
        end = [] if self.endless else [min(self.tokenizer.eos_token_ids)]
        for _ in range(limit):
            if cancel.is_set:
                return
            time.sleep(self.token_s)
            made = sequence.made
            if made >= len(ids) and self.error is not None:
                raise self.error
            if made >= len(ids) + len(end) and not self.endless:
                return
            token = ids[made % len(ids)] if self.endless else [*ids, *end][made]
            sequence.made += 1
            self.yielded += 1
            yield DecodedToken(token, -0.5, ((token, -0.5), (65, -2.0)))
            if token in stop_ids:
                return


def text_backend(tokenizer: Tokenizer, text: str = "Hello", **options: Any) -> TextBackend:
    config = ModelConfig("LlamaForCausalLM", 64, 64, 1, 1, 1, 64, tokenizer.vocab_limit, 8192)
    return TextBackend(text=text, tokenizer=tokenizer, config=config, **options)


@contextlib.contextmanager
def serving(app: Starlette, *, head_timeout_s: float = 30.0) -> Iterator[str]:
    """Serve an application on a free loopback port, in a thread; yield its address."""
    protocol = type("_Protocol", (GuardedProtocol,), {"head_timeout_s": head_timeout_s})
    config = uvicorn.Config(app, port=0, log_level="error", http=protocol, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive(), START_S)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition; fail after a generous time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
