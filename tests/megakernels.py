"""Small models on the megakernel, on the shim or a GPU, and what the PyTorch reference makes of the same weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec
from onekernel.device.watch import Watch
from onekernel.engine.megakernel import Megakernel
from onekernel.engine.running_launch import STUCK_EXIT_CODE
from onekernel.errors import ConfigError
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.models.load import load_packed, load_weights
from onekernel.models.model import LayerWeights, Model, ModelWeights, Place, Weights
from onekernel.models.packed import PackedModel
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.plan.limits import Limits
from onekernel.plan.plan import Plan, make_plan
from onekernel.weights.checkpoint import Checkpoint
from onekernel.weights.open import open_checkpoint
from tests import oracle

CONTEXT = 192
PAGES = 8

LOGITS = 2e-2
"""Relative L2 of logits that both sides compute in bf16 between phases, or of one phase's values."""

NOISE = 5.0
"""A token need not be the likeliest in float32 if its logit is closer to the best than this many times what rounding to
bf16 moves the reference's own logits, root mean square, where it moves those of an answer most. How far it moves them
differs tenfold between tokens: measured against the reference's luck at the same one, another right implementation in
bf16 would fail 1 of 17 answers of 48 tokens."""


def checkpoint_of(name: str, folder: Path, **changes: Any) -> tuple[Checkpoint, ModelConfig]:
    """Make a model of tests/oracle.py and open it."""
    oracle.make(name, folder, **changes)
    checkpoint = open_checkpoint(str(folder))
    return checkpoint, model_config(checkpoint.settings.config)


def quiet(done: int, total: int) -> None:
    """No progress bar."""


def weights_of(checkpoint: Checkpoint, config: ModelConfig, device: str = "cpu") -> ModelWeights:
    """The checkpoint in bf16."""
    return load_weights(checkpoint, config, dtype=torch.bfloat16, device=device, progress=quiet)


def packed_of(checkpoint: Checkpoint, plan: Plan, device: str = "cpu") -> PackedModel:
    """The checkpoint in the layout of a plan, read tensor by tensor."""
    return load_packed(checkpoint, plan.config, plan.layout, device=device, progress=quiet)


def small_limits(ctas: int, warps: int, **changes: Any) -> Limits:
    """Blocks of one page, so that short texts have several members."""
    values = {"ctas": ctas, "max_context": CONTEXT, "num_pages": PAGES, "block_pages": 1, "consumer_warps": warps}
    return Limits(**{**values, "stage_bytes": warps * 1024, **changes})


def small_plan(config: ModelConfig, ctas: int = 3, *, limits: dict[str, Any] | None = None, **options: Any) -> Plan:
    """A plan with as few consumer warps as the head allows, since each of them costs the shim 32 fibers."""
    for warps in (4, 8, 16):
        try:
            return make_plan(config, small_limits(ctas, warps, **(limits or {})), **options)
        except ConfigError as error:
            refused = error
    raise refused


def shape_of(plan: Plan, stages: int = 6) -> MegakernelShape:
    """A shape with few ring stages, so that the ring goes round within a phase."""
    limits = plan.limits
    return MegakernelShape.of(
        plan.config,
        sequences=limits.sequences,
        warps=limits.consumer_warps,
        stages=min(stages, plan.shared.stages),
        sparse=plan.layout.sparse,
    )


class ThreadedKernel:
    """A shim kernel whose launches return at once and run on in a thread, as a GPU's do. It counts them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.launches = 0

    @property
    def spec(self) -> KernelSpec:
        return self._kernel.spec

    def launch(self, grid: int, block: int, args: Sequence[Arg], **options: Any) -> None:
        def work() -> None:
            try:
                self._kernel.launch(grid, block, args, **options)
            except BaseException as error:
                self._error = error

        self.launches += 1
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Whether the last launch has ended; raises what it raised."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True


class ThreadedMegakernel(Megakernel):
    """A megakernel on a `ThreadedKernel`."""

    kernel: ThreadedKernel

    def ended(self) -> bool:
        return self.kernel.ended()


class InFloat32:
    """The values of other weights as float32."""

    dtype = torch.float32

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.embedding, self.final_norm = weights.embedding, weights.final_norm
        self.layers = [in_float32(layer) for layer in weights.layers]

    @property
    def head(self) -> torch.Tensor:
        return self._weights.head.float()


def in_float32(layer: LayerWeights) -> LayerWeights:
    """The same values in float32; cloned, because packed layers are unpacked to one place."""
    values = {name: getattr(layer, name) for name in LayerWeights.__slots__}
    return LayerWeights(**{name: None if v is None else v.float().clone() for name, v in values.items()})


@dataclass(slots=True)
class Reference:
    """The reference on the same weights, with its own cache."""

    model: Model
    context: int = CONTEXT
    """Tokens that the RoPE table is made for; only dynamic scaling looks at it."""
    step: int = 1
    """Tokens of an answer at once. Packed weights are unpacked for each step: long answers want many."""
    _exact: Model | None = None

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return logits, (len(answer), vocab_size), before each token of an answer that is given."""
        config, device = self.model.config, self.model.device
        table = torch.arange(-(-self.context // 64))
        cache = KVCache.allocate(config, len(table), self.model.dtype, str(device))
        cache.pages.fill_(float("nan"))
        rope = rope_table(config, self.context).to(device)
        for start in range(0, len(prompt) - 1, 512):
            self.model.extend(prompt[start : min(start + 512, len(prompt) - 1)], Place(cache, table, rope, start))
        tokens = [prompt[-1], *answer[:-1]]
        rows = [
            self.model.logits(tokens[first : first + self.step], Place(cache, table, rope, len(prompt) - 1 + first))
            for first in range(0, len(tokens), self.step)
        ]
        return torch.cat(rows).cpu()

    def exact(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """The same in float32."""
        if self._exact is None:
            self._exact = Model(self.model.config, InFloat32(self.model.weights))
        return Reference(self._exact, self.context, self.step).logits(prompt, answer)

    def check_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Demand that each token is the likeliest one in float32, or within the noise of it."""
        bf16, exact = self.logits(prompt, answer), self.exact(prompt, answer)
        noise = (bf16 - exact).square().mean(dim=1).sqrt().max()
        gap = exact.max(dim=1).values - exact.gather(1, torch.tensor(answer)[:, None])[:, 0]
        wrong = (gap > NOISE * noise).nonzero()[:, 0].tolist()
        assert not wrong, f"tokens {wrong} of {list(answer)}: {gap[wrong] / noise} times the noise from the best"


def put_together(
    plan: Plan,
    packed: PackedModel,
    load: Callable[[KernelSpec], Kernel],
    kind: type[Megakernel] = Megakernel,
    stages: int = 6,
) -> Megakernel:
    """A megakernel with a cache of NaN."""
    shape = shape_of(plan, stages)
    cache = KVCache.allocate(plan.config, plan.limits.num_pages, torch.bfloat16, str(packed.arena.device))
    cache.pages.fill_(float("nan"))
    return kind(plan, packed, cache, load(shape.spec()), shape)


def prompt_of(config: ModelConfig, tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: list[int] = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def wait(megakernel: Megakernel, seconds: float = 5.0) -> None:
    """Wait for the end of a launch; a stuck kernel is stopped, and if that fails too the process ends."""
    for stop in (False, True):
        give_up = time.monotonic() + seconds
        while not megakernel.ended():
            if time.monotonic() > give_up:
                break
            time.sleep(1e-4)
        else:
            return
        if not stop:
            megakernel.watch.stop()
    os._exit(STUCK_EXIT_CODE)


def published(megakernel: Megakernel, name: str, phase: int, values: int) -> torch.Tensor:
    """The bf16 pairs in a buffer of the exchange, all of which carry the tag of `phase` of token 0, as float32."""
    buffer = next(buffer for buffer in megakernel.plan.buffers if buffer.name == name)
    words = megakernel.exchange[buffer.word : buffer.word + -(-values // 2)].cpu()
    assert (words >> 32 == phase + 1).all()
    return (words & 0xFFFFFFFF).int().view(torch.bfloat16)[:values].float()


@dataclass(frozen=True, slots=True)
class Made:
    """What a launch gave: for each sequence its tokens, and the logits before the last of them."""

    tokens: list[list[int]]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and its weights packed for a plan, on one device."""

    config: ModelConfig
    weights: Weights
    plan: Plan
    packed: PackedModel

    @property
    def reference(self) -> Reference:
        """The reference on the same weights."""
        return Reference(Model(self.config, self.weights), self.plan.limits.max_context)

    def megakernel(self, load: Callable[[KernelSpec], Kernel], *, stages: int = 6, max_turns: int = 0) -> Megakernel:
        """A kernel for it; `max_turns`: after which its waits give up."""
        made = put_together(self.plan, self.packed, load, stages=stages)
        if max_turns:
            made.watch = Watch.create(made.device, self.plan.limits.ctas, made.shape.threads, max_turns)
        return made

    def fill(self, megakernel: Megakernel, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Prefill with the reference into a poisoned cache with scattered pages, and return the page table."""
        table_pages = self.plan.limits.table_pages
        order = torch.randperm(megakernel.cache.num_pages, generator=torch.Generator().manual_seed(4))
        table = order[: len(prompts) * table_pages].view(len(prompts), -1)
        megakernel.cache.pages.fill_(float("nan"))
        megakernel.logits.fill_(float("nan"))
        model = Model(self.config, self.weights)
        rope = rope_table(self.config, self.plan.limits.max_context).to(megakernel.device)
        for prompt, pages in zip(prompts, table, strict=True):
            for start in range(0, len(prompt) - 1, 512):
                chunk = prompt[start : min(start + 512, len(prompt) - 1)]
                model.extend(chunk, Place(megakernel.cache, pages, rope, start))
        return table.int().contiguous().to(megakernel.device)

    def run(self, megakernel: Megakernel, prompts: Sequence[Sequence[int]], limit: int, **options: Any) -> Made:
        """Prefill, launch, and wait for the end; raises DeviceError if the kernel was stopped."""
        table = self.fill(megakernel, prompts)
        first, positions = [prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
        megakernel.launch(first, positions, table, limit, want_logits=True, **options)
        wait(megakernel)
        megakernel.check()
        slots = [[megakernel.read(i, s) for i in range(limit)] for s in range(len(prompts))]
        return Made([[slot.token_id for slot in of if slot] for of in slots], megakernel.logits.clone().cpu())

    def check(self, prompts: Sequence[Sequence[int]], made: Made, limit: int) -> None:
        """Demand the reference's tokens, and last logits as close to float32 as its own are to within a factor of 2."""
        for prompt, tokens, logits in zip(prompts, made.tokens, made.logits, strict=True):
            assert len(tokens) == limit
            self.reference.check_greedy(prompt, tokens)
            bf16, exact = self.reference.logits(prompt, tokens), self.reference.exact(prompt, tokens)
            theirs = float((bf16 - exact).square().mean(dim=1).sqrt().max())
            ours = float((logits - exact[-1]).square().mean().sqrt())
            assert ours < 2 * theirs + 2e-3 * float(exact[-1].std()), (
                f"{ours:.4f} from float32, the reference {theirs:.4f}"
            )
