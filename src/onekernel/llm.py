"""The public Python interface: load a model, generate, stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, cast, overload

from onekernel.config import EngineConfig, ModelConfig, SamplingParams
from onekernel.engine.engine import Deliver, Progress
from onekernel.engine.load import Listener, Loaded, load_engine
from onekernel.engine.prompt import Prompt, encode, is_one_prompt
from onekernel.engine.request import CancelToken, Completion, Constraint
from onekernel.engine.stream import AnswerStream, AsyncAnswerStream, Submit
from onekernel.errors import QueueFullError
from onekernel.text.tokenizer import Tokenizer


def _no_progress(done: int, total: int) -> None:
    pass


class LLM:
    """A loaded model. Use it as a context manager, or call `close`, to free everything.

    model: a local Hugging Face directory, a GGUF file, or a hub id. device: "auto", "cpu", "cuda" or "cuda:N".
    dtype: "auto" (bf16, or float32 for a float32 checkpoint on a CPU), "bfloat16" or "float32". max_context: tokens of
    prompt and answer together; None: the smaller of the model's maximum and 8,192; 0: the model's maximum.
    slice_tokens, max_waiting, prefix_cache, kv_tokens: how requests share the engine, see `EngineConfig`.
    sparse: whether the megakernel reads only the neurons that fire, of models with a ReLU gate.
    load_format "dummy": random weights for a config.json or the name of a shipped configuration.

    Raises ModelError, ConfigError, MemoryLimitError, DeviceError (see `onekernel.errors`).
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        max_context: int | None = None,
        backend: Literal["auto", "reference", "megakernel"] = "auto",
        threads: int | None = None,
        slice_tokens: int = 64,
        max_waiting: int = 256,
        prefix_cache: bool = True,
        kv_tokens: int | None = None,
        sparse: Literal["auto", "on", "off"] = "auto",
        revision: str | None = None,
        load_format: Literal["auto", "dummy"] = "auto",
        listener: Listener | None = None,
    ) -> None:
        options = EngineConfig(
            device=device,
            dtype=dtype,
            max_context=max_context,
            backend=backend,
            threads=threads,
            slice_tokens=slice_tokens,
            max_waiting=max_waiting,
            prefix_cache=prefix_cache,
            kv_tokens=kv_tokens,
            sparse=sparse,
        )
        self._loaded = load_engine(str(model), options, revision=revision, load_format=load_format, listener=listener)

    @property
    def loaded(self) -> Loaded:
        """The engine, its settings and how long each step of loading took."""
        return self._loaded

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        return self._loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.engine.tokenizer

    @property
    def max_context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._loaded.engine.backend.max_context

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **template: Any) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **template: Any
    ) -> list[Completion]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **template: Any
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them, which take turns and may be more than may wait at once.

        A string or token ids are taken as they are; messages (`[{"role": "user", "content": ...}]`) go through the
        chat template, to which `template` is passed. If one of a list fails, its error is raised and the rest is
        cancelled.
        """
        if is_one_prompt(prompt):
            return self.stream(cast("Prompt", prompt), params, **template).result()
        streams: list[AnswerStream] = []
        answers: list[Completion] = []
        try:
            for one in prompt:
                while True:
                    try:
                        streams.append(self.stream(cast("Prompt", one), params, **template))
                        break
                    except QueueFullError:
                        if len(answers) == len(streams):
                            raise  # the queue is full of others' requests
                        answers.append(streams[len(answers)].result())
            return answers + [stream.result() for stream in streams[len(answers) :]]
        finally:
            for stream in streams:
                stream.cancel()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: Progress = _no_progress,
        constraint: Constraint | None = None,
        **template: Any,
    ) -> AnswerStream:
        """Start one answer and return its deltas; closing the iterator cancels it.

        progress(done, total) counts prefilled prompt tokens, on the engine's thread. A `constraint` says before each
        token which may come; it serves this answer only, and costs a launch for each token.
        """
        return AnswerStream(self._submit(prompt, params, progress, constraint, template))

    def close(self) -> None:
        """Cancel what runs and free weights, cache and thread. A second call does nothing."""
        self._loaded.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        progress: Progress,
        constraint: Constraint | None,
        template: Mapping[str, Any],
    ) -> Submit:
        engine = self._loaded.engine
        encoded = encode(self.tokenizer, prompt, template, engine.check_length)

        def submit(deliver: Deliver) -> CancelToken:
            return engine.submit(
                encoded.token_ids,
                params or SamplingParams(),
                deliver,
                progress=progress,
                splitter=encoded.splitter,
                continues=encoded.continues,
                constraint=constraint,
            )

        return submit


class AsyncLLM:
    """`LLM` for asyncio. `await AsyncLLM.load(...)` takes what `LLM` takes; use it with `async with`."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    async def load(cls, model: str, **options: Any) -> Self:
        """Load a model without blocking the loop."""
        return cls(await asyncio.to_thread(LLM, model, **options))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **template: Any) -> Completion:
        """Answer one prompt; use asyncio.gather for several."""
        stream = self.stream(prompt, params, **template)
        try:
            return await stream.result()
        finally:
            stream.cancel()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        progress: Progress = _no_progress,
        constraint: Constraint | None = None,
        **template: Any,
    ) -> AsyncAnswerStream:
        """Start one answer as `LLM.stream` does; iterate with `async for`; `aclose` or leaving `async with` cancels."""
        return AsyncAnswerStream(self.llm._submit(prompt, params, progress, constraint, template))

    async def close(self) -> None:
        """Free everything."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
