"""A scripted backend, so that the engine's own behaviour is tested without a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from onekernel.config import PREFILL_CHUNK_TOKENS, EngineConfig, ModelConfig, Sampling
from onekernel.engine.backend import DecodedToken, MemoryReport, SequenceState, never
from onekernel.engine.engine import Engine, Event
from onekernel.engine.request import CancelToken
from onekernel.engine.status import CacheUse
from onekernel.text.tokenizer import Tokenizer

EOS = 256
VOCAB = 260


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Token id = byte value; 256 is the end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = {letter: index for index, letter in enumerate(_bytes_to_letters(alphabet))}
    hub = HubTokenizer(models.BPE(vocab=by_byte, merges=[]))
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hub.decoder = decoders.ByteLevel()
    hub.add_special_tokens(["<eos>"])
    folder: Path = tmp_path_factory.mktemp("bytes")
    hub.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_directory(folder, {"eos_token_id": EOS}, {})


def _bytes_to_letters(alphabet: Sequence[str]) -> list[str]:
    """GPT-2's byte alphabet in the order of the bytes: printable ones stand for themselves, the rest follow 255."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 256 + 256 - len(own)))
    letters = [chr(byte) if byte in own else chr(next(rest)) for byte in range(256)]
    assert sorted(letters) == sorted(alphabet)
    return letters


@dataclass
class Script:
    """What the backend says: token ids; an exception instead of a token is raised at that point."""

    tokens: Sequence[int | BaseException]
    delay_s: float = 0.0


@dataclass
class ScriptedSequence:
    prompt: list[int]
    length: int = 0
    made: int = 0


@dataclass
class ScriptedBackend:
    """Answers every request with `script`, and notes what it was asked and in which order.

    Owners in `trace` are the first tokens of prompts; a chunk of prefill is an owner's negative number. `room`: how
    many sequences have pages at once. `gates`: at which count of tokens made to wait for what.
    """

    script: Script
    max_context: int = 4096
    name: str = "scripted"
    device: str = "cpu"
    config: ModelConfig = field(
        default_factory=lambda: ModelConfig("LlamaForCausalLM", 64, 64, 1, 1, 1, 64, VOCAB, 8192)
    )
    memory: MemoryReport = field(default_factory=lambda: MemoryReport(0, 0, 0))
    open_sequences: int = 0
    chunks: int = 0
    yielded: int = 0
    limits: list[int] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    closed: bool = False
    prefill_gate: threading.Event | None = None
    trace: list[int] = field(default_factory=list)
    room: int = 1000
    gates: dict[int, threading.Event] = field(default_factory=dict)
    masks: list[torch.Tensor | None] = field(default_factory=list)
    released: list[tuple[int, bool]] = field(default_factory=list)

    def has_room(self, prompt: Sequence[int], total_tokens: int) -> bool:
        return self.open_sequences < self.room

    def cache_use(self) -> CacheUse:
        return CacheUse(self.open_sequences, 0, self.room)

    def open(self, prompt: Sequence[int], total_tokens: int) -> SequenceState:
        self.open_sequences += 1
        return ScriptedSequence(list(prompt))

    def prefill(
        self,
        sequence: SequenceState,
        cancel: CancelToken,
        progress: Callable[[int, int], None],
        pause: Callable[[], bool] = never,
    ) -> None:
        assert isinstance(sequence, ScriptedSequence)
        total = len(sequence.prompt) - 1
        while sequence.length < total and not cancel.is_set:
            if self.prefill_gate is not None:
                self.prefill_gate.wait(10)
            sequence.length = min(total, sequence.length + PREFILL_CHUNK_TOKENS)
            self.chunks += 1
            self.trace.append(-sequence.prompt[0])
            progress(sequence.length, total)
            if pause():
                return

    def decode(
        self,
        sequence: SequenceState,
        sampling: Sampling,
        limit: int,
        stop_ids: frozenset[int],
        cancel: CancelToken,
        mask: torch.Tensor | None = None,
    ) -> Generator[DecodedToken, None, None]:
        self.limits.append(limit)
        self.samplings.append(sampling)
        self.masks.append(mask)
        assert isinstance(sequence, ScriptedSequence)
        for step in self.script.tokens[sequence.made : sequence.made + limit]:
            if (gate := self.gates.get(self.yielded)) is not None:
                assert gate.wait(10)
            if cancel.is_set:
                return
            if isinstance(step, BaseException):
                raise step
            time.sleep(self.script.delay_s)
            self.yielded += 1
            sequence.made += 1
            self.trace.append(sequence.prompt[0])
            yield DecodedToken(step, -0.5, ((step, -0.5), (65, -2.0)))
            if step in stop_ids:
                return

    def release(self, sequence: SequenceState, *, failed: bool = False) -> None:
        assert isinstance(sequence, ScriptedSequence)
        self.open_sequences -= 1
        self.released.append((sequence.prompt[0], failed))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def start(byte_tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[Engine, ScriptedBackend]]]:
    """Start engines on scripted backends; they are closed after the test."""
    engines: list[Engine] = []

    def make(tokens: Sequence[int | BaseException] | bytes, **options: object) -> tuple[Engine, ScriptedBackend]:
        settings = options.pop("settings", None)
        assert settings is None or isinstance(settings, EngineConfig)
        delay = float(options.pop("delay_s", 0.0))  # type: ignore[arg-type]
        backend = ScriptedBackend(Script(list(tokens), delay), **options)  # type: ignore[arg-type]
        engine = Engine(backend, byte_tokenizer, {}, settings)
        engines.append(engine)
        return engine, backend

    yield make
    for engine in engines:
        engine.close()


def is_delta(event: Event) -> bool:
    return type(event).__name__ == "Delta"
