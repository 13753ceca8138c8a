"""Small models on the megakernel, on the shim or a GPU, and what the PyTorch reference makes of the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onekernel.config import ModelConfig
from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.megakernel import Megakernel
from onekernel.errors import ConfigError
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.models.load import load_packed, load_weights
from onekernel.models.model import Model, ModelWeights, Place
from onekernel.models.packed import PackedModel, pack
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

NOISE = 0.05
"""A token may be another than the reference's if its logit is closer to the best than this part of the logits' standard
deviation: bf16 between phases moves a logit by about 1 % of that."""


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


def shape_of(plan: Plan, stages: int = 5) -> MegakernelShape:
    """A shape with few ring stages, so that the ring goes round within a phase."""
    limits = plan.limits
    return MegakernelShape.of(
        plan.config,
        sequences=limits.sequences,
        warps=limits.consumer_warps,
        stages=min(stages, plan.shared.stages),
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


@dataclass(slots=True)
class Reference:
    """The reference on the same weights, with its own cache."""

    model: Model
    context: int = CONTEXT
    """Tokens that the RoPE table is made for; only dynamic scaling looks at it."""

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return logits, (len(answer), vocab_size), before each token of an answer that is given: one token a step."""
        config, device = self.model.config, self.model.device
        table = torch.arange(-(-self.context // 64))
        cache = KVCache.allocate(config, len(table), self.model.dtype, str(device))
        cache.pages.fill_(float("nan"))
        rope = rope_table(config, self.context).to(device)
        if len(prompt) > 1:
            self.model.extend(prompt[:-1], Place(cache, table, rope, 0))
        rows = [
            self.model.logits([token], Place(cache, table, rope, len(prompt) - 1 + step))
            for step, token in enumerate([prompt[-1], *answer[:-1]])
        ]
        return torch.cat(rows).cpu()

    def check_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Demand that each token is the likeliest one, or within the noise of it."""
        logits = self.logits(prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gap = (logits.max(dim=1).values - chosen) / logits.std(dim=1)
        assert float(gap.max()) <= NOISE, f"token {int(gap.argmax())} of {list(answer)} is {float(gap.max()):.3f} off"


def put_together(
    plan: Plan,
    packed: PackedModel,
    load: Callable[[KernelSpec], Kernel],
    kind: type[Megakernel] = Megakernel,
    stages: int = 5,
) -> Megakernel:
    """A megakernel with a cache of NaN."""
    shape = shape_of(plan, stages)
    cache = KVCache.allocate(plan.config, plan.limits.num_pages, torch.bfloat16, str(packed.arena.device))
    cache.pages.fill_(float("nan"))
    return kind(plan, packed, cache, load(shape.spec()), shape)


def pack_for(plan: Plan, weights: ModelWeights) -> PackedModel:
    """Pack weights that exist already."""
    return pack(weights, plan.config, plan.layout)


def prompt_of(config: ModelConfig, tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: list[int] = torch.randint(config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids
