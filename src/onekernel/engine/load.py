"""From a model's path or id to a running engine, step by step, each step timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from onekernel.config import PAGE_TOKENS, EngineConfig, ModelConfig, context_tokens, defaults_from
from onekernel.device.compile import mark_ready
from onekernel.device.facts import facts
from onekernel.device.host import default_threads
from onekernel.device.resolve import resolve_device
from onekernel.engine.backend import Backend, MemoryReport
from onekernel.engine.engine import Engine
from onekernel.engine.gpu_claim import claim_gpu
from onekernel.engine.kv_size import describe, kv_pages, with_pages
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.megakernel_load import Planned, assemble, plan_megakernel, prefill_kernels, warm_up
from onekernel.engine.memory import check_memory, format_bytes, free_memory, plan_memory
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.engine.ternary import place_on, place_packed_on
from onekernel.errors import ConfigError
from onekernel.models.load import load_packed, load_weights
from onekernel.models.model import Model, Weights
from onekernel.models.packed import PackedModel
from onekernel.models.registry import model_config
from onekernel.models.ternary import load_packed_ternary, load_ternary
from onekernel.plan.plan import Plan
from onekernel.text.tokenizer import Tokenizer
from onekernel.weights.checkpoint import Checkpoint, CheckpointSettings
from onekernel.weights.open import LoadFormat, open_checkpoint


@dataclass(slots=True)
class Listener:
    """Whom loading tells what: `note` sentences for the user, `detail` for -v, `progress` (what, done, total)."""

    note: Callable[[str], None] = lambda text: None
    detail: Callable[[str], None] = lambda text: None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A running engine with what it was made from; `steps_s` are the seconds of each step in order."""

    engine: Engine
    settings: CheckpointSettings
    config: ModelConfig
    dtype: torch.dtype
    steps_s: dict[str, float]

    @property
    def load_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.steps_s.values())


@dataclass(slots=True)
class _Clock:
    listener: Listener
    steps_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.steps_s[name] = time.perf_counter() - start
        self.listener.detail(f"{name}: {self.steps_s[name]:.2f} s")

    def tensors(self, done: int, total: int) -> None:
        self.listener.progress("loading tensors", done, total)


def load_engine(
    model: str,
    options: EngineConfig,
    *,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    listener: Listener | None = None,
) -> Loaded:
    """Open `model`, check that it fits, load its weights and start an engine.

    Raises ModelError and its kin for the files, ConfigError for options that the model cannot meet, MemoryLimitError
    before anything large is allocated.
    """
    listener = listener or Listener()
    clock = _Clock(listener)
    torch.set_num_threads(options.threads or default_threads())
    with clock.step("open"):
        resolved = resolve_device(options.device)
        device = resolved.device
        checkpoint = open_checkpoint(model, revision=revision, load_format=load_format, progress=listener.note)
        settings = checkpoint.settings
        config = model_config(settings.config)
        context = context_tokens(options.max_context, config)
    dtype = choose_dtype(options.dtype, config, device)
    check_memory(config, dtype, device, context, free_memory(device))  # a lower bound, before anything takes long
    with clock.step("tokenizer"):
        tokenizer = open_tokenizer(settings, config)
    vocab_limit = min(config.vocab_size, tokenizer.vocab_limit)
    planned = _plan(options, config, device, dtype, context, vocab_limit)
    free = free_memory(device)
    spare = free - plan_memory(config, dtype, device, context, planned.plan).total_bytes
    page_bytes = PAGE_TOKENS * config.kv_bytes_per_token(dtype.itemsize)
    pages = kv_pages(options.kv_tokens, context, page_bytes, spare)
    memory = check_memory(config, dtype, device, context, free, planned.plan, pages)
    backend_name = ReferenceBackend.name if planned.plan is None else MegakernelBackend.name
    for note in settings.notes:
        listener.note(note)
    listener.note(f"device {device} ({resolved.reason}), backend {backend_name}, {str(dtype).removeprefix('torch.')}")
    if options.backend == "auto" and planned.plan is None and device.startswith("cuda"):
        listener.note(f"not the megakernel: {planned.reason}")
    if planned.plan is not None and planned.plan.layout.sparse:
        listener.note("feed-forwards read only the neurons that fire; --sparse off: all of them")
    listener.note(
        f"context {context} of {config.context_limit} tokens; memory: weights {format_bytes(memory.weights_bytes)}, "
        f"KV cache {format_bytes(memory.kv_bytes)}{describe(pages, context)}, "
        f"workspace {format_bytes(memory.workspace_bytes)}"
    )
    taken = defaults_from(settings.generation_config)
    listener.detail(f"from generation_config: {taken or 'nothing'}")
    listener.detail(f"end-of-sequence ids: {sorted(tokenizer.eos_token_ids)}")
    mark_ready(False)
    with ExitStack() as undo:
        claim = None
        backend: Backend
        if planned.plan is not None:
            claim = claim_gpu(facts(device).uuid)
            undo.callback(claim.close)
            plan = with_pages(planned.plan, pages)
            backend = _megakernel_backend(checkpoint, plan, device, memory, clock, prefix_cache=options.prefix_cache)
        else:
            with clock.step("weights"):
                weights = _reference_weights(checkpoint, config, dtype, device, clock)
                checkpoint.close()
            with clock.step("backend"):
                backend = ReferenceBackend(
                    Model(config, weights),
                    max_context=context,
                    num_pages=pages,
                    vocab_limit=vocab_limit,
                    memory=memory,
                    prefix_cache=options.prefix_cache,
                )
        mark_ready()
        engine = Engine(backend, tokenizer, settings.generation_config, options, claim)
        undo.pop_all()
    return Loaded(engine, settings, config, dtype, clock.steps_s)


def open_tokenizer(settings: CheckpointSettings, config: ModelConfig) -> Tokenizer:
    """Return the model's tokenizer; a dummy model without one gets the placeholder whose words are the ids."""
    files = settings.tokenizer
    if files.directory is not None:
        return Tokenizer.from_directory(files.directory, settings.config, settings.generation_config)
    if files.gguf_metadata is not None:
        return Tokenizer.from_gguf(files.gguf_metadata, settings.config, settings.generation_config)
    return Tokenizer.placeholder(config.vocab_size)


def choose_dtype(asked: str, config: ModelConfig, device: str) -> torch.dtype:
    """Return the matrices' dtype: as asked, else bf16, or float32 for a float32 checkpoint on a CPU."""
    if asked == "auto":
        keep = config.dtype == "float32" and not device.startswith("cuda")
        return torch.float32 if keep else torch.bfloat16
    return torch.float32 if asked == "float32" else torch.bfloat16


def _plan(
    options: EngineConfig, config: ModelConfig, device: str, dtype: torch.dtype, context: int, vocab_limit: int
) -> Planned:
    """Return the plan of the megakernel, or why it is not used; raises ConfigError if it was asked for."""
    planned = Planned(None, "the reference was asked for")
    if options.backend != "reference":
        planned = plan_megakernel(config, device, dtype, context, vocab_limit, sparse=options.sparse)
    if planned.plan is None and options.sparse == "on":
        raise ConfigError(
            f"sparse is on and only the megakernel reads just the neurons that fire, which is not possible: "
            f"{planned.reason}; leave it at auto"
        )
    if planned.plan is None and options.backend == "megakernel":
        raise ConfigError(f"backend megakernel is not possible: {planned.reason}; use --backend auto or reference")
    return planned


def _megakernel_backend(
    checkpoint: Checkpoint, plan: Plan, device: str, memory: MemoryReport, clock: _Clock, *, prefix_cache: bool
) -> Backend:
    with clock.step("weights"):
        packed = _packed_weights(checkpoint, plan, device, clock)
        checkpoint.close()
    with clock.step("kernel"):
        megakernel = assemble(plan, packed, device, clock.listener.note)
        prefill = prefill_kernels(megakernel, device)
    with clock.step("backend"):
        backend = MegakernelBackend(megakernel, memory=memory, prefix_cache=prefix_cache, prefill=prefill)
        warm_up(backend)
    return backend


def _packed_weights(checkpoint: Checkpoint, plan: Plan, device: str, clock: _Clock) -> PackedModel:
    config, layout = plan.config, plan.layout
    if config.ternary is None:
        return load_packed(checkpoint, config, layout, device=device, progress=clock.tensors)
    place = place_packed_on(device)
    return load_packed_ternary(checkpoint, config, layout, device=device, progress=clock.tensors, place=place)


def _reference_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: str, clock: _Clock
) -> Weights:
    if config.ternary is None:
        return load_weights(checkpoint, config, dtype=dtype, device=device, progress=clock.tensors)
    place = place_on(device)
    return load_ternary(checkpoint, config, dtype=dtype, device=device, progress=clock.tensors, place=place)
