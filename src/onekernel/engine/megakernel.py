"""A plan, packed weights and a kernel, put together: clears the exchange, launches, reads tokens as they come.

Knows nothing of requests; `megakernel_backend.py` does. The kernel may be the GPU's or the CPU shim's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.watch import Watch
from onekernel.engine.choosing import ChooseBuffers, Choosing
from onekernel.errors import ConfigError
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.models.packed import PackedModel
from onekernel.phases.attention.cache import KVCache
from onekernel.plan.abi import MAX_LAUNCH_TOKENS, NO_PHASE, TOKEN_FAILED, TOKEN_STOP, ChooseMode, Failure, Kind
from onekernel.plan.plan import Plan

MAX_STOP_IDS = 64
_SMALL_LAYER_STAGES = 24
"""Of one CTA. Qwen3-0.6B has 15, where one stage on its way in short phases is faster; Llama-3.2-1B has 57."""
_TOKEN_BITS = TOKEN_FAILED - 1
_NO_ROOM = 8
"""Words of a trace that nobody reads: a traced kernel writes the head of its streams in any case."""


@dataclass(frozen=True, slots=True)
class Slot:
    """What the kernel said of one token. With a `failure` there is none, and `token_id` means nothing."""

    token_id: int
    last: bool
    failure: Failure | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Windows:
    """Ring stages on their way at once: `short` in phases of up to `long_phase` stages for a CTA, else `long`.

    In phases of more than `deep_phase` stages it is `deep` from stage `deep_from` on, as in attention to more than two
    pieces of the cache. While the ring is full, L2 is asked for up to `lead` stages more, one each `pace` cycles.
    docs/findings/decode.md has what was measured.
    """

    short: int = 2
    long: int = 3
    long_phase: int = 12
    deep: int = 5
    deep_phase: int = 40
    deep_from: int = 8
    lead: int = 8
    pace: int = 1100

    @classmethod
    def of(cls, plan: Plan) -> Windows:
        """Return the windows for a plan: in layers of few stages it is values that are waited for, not weights."""
        layers = [phase.kind not in (Kind.EMBED, Kind.HEAD, Kind.CHOOSE) for phase in plan.phases]
        layer_bytes = int(plan.bytes_per_phase[:, layers].sum(axis=1).max()) // plan.config.num_hidden_layers
        return cls(short=1 if layer_bytes <= _SMALL_LAYER_STAGES * plan.limits.stage_bytes else 2)


@dataclass(frozen=True, slots=True)
class TraceBuffer:
    """Where a traced kernel writes down token `token` of a launch: (ctas, 2, room) int64 on the device."""

    words: torch.Tensor
    token: int


class Megakernel:
    """One plan on one device with one kernel. `launch` returns at once on a GPU; `read` polls the tokens' slots."""

    def __init__(self, plan: Plan, packed: PackedModel, cache: KVCache, kernel: Kernel, shape: MegakernelShape) -> None:
        if plan.shared.stages < shape.stages:
            raise ConfigError(
                f"the plan leaves room for {plan.shared.stages} ring stages, the kernel was built for {shape.stages}"
            )
        device = packed.arena.device
        pinned = device.type == "cuda"
        sequences = plan.limits.sequences
        self.plan, self.kernel, self.shape, self.device = plan, kernel, shape, device
        self.packed, self.cache = packed, cache
        self._windows = Windows.of(plan)
        self._tasks = torch.from_numpy(plan.tasks.view(np.uint8).reshape(-1).copy()).to(device)
        self.exchange = torch.zeros(plan.exchange_words, dtype=torch.int64, device=device)
        self._slots = torch.zeros(MAX_LAUNCH_TOKENS, sequences, dtype=torch.int64, pin_memory=pinned)
        self._words = self._slots.numpy()
        self._limit = 0
        self._cancel = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self.logits = torch.empty(sequences, plan.config.vocab_size, dtype=torch.float32, device=device)
        self._choose = ChooseBuffers(plan, device)
        self._stop_ids = torch.zeros(MAX_STOP_IDS, dtype=torch.int32, device=device)
        self.watch = Watch.create(device, plan.limits.ctas, shape.threads)
        self._untraced = TraceBuffer(torch.zeros(plan.limits.ctas, 2, _NO_ROOM, dtype=torch.int64, device=device), 0)
        self._end = torch.cuda.Event() if pinned else None

    def _header(self, block_pages: int | None) -> bytes:
        header = self.plan.header.copy()
        if block_pages is not None:
            header["block_pages"] = block_pages
        return header.tobytes()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, with as many ring stages as the kernel was built for."""
        spare = self.plan.shared.stages - self.shape.stages
        return self.plan.shared.total_bytes - spare * (self.plan.limits.stage_bytes + 16)

    def launch(
        self,
        first_tokens: Sequence[int],
        positions: Sequence[int],
        page_table: torch.Tensor,
        limit: int,
        *,
        stop_ids: Sequence[int] = (),
        choosing: Sequence[Choosing] = (),
        want_logits: bool = False,
        stop_after: int = NO_PHASE,
        windows: Windows | None = None,
        block_pages: int | None = None,
        trace: TraceBuffer | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start making up to `limit` tokens after `first_tokens`, which stand at `positions`.

        page_table: (sequences, table_pages) int32 on the device; each sequence's pages cover positions + limit tokens.
        `choosing` says for each sequence how its tokens are chosen; without it all are greedy. `block_pages`: how the
        cache is shared out, see `Plan.block_pages_after`; default: the plan's.
        `stop_after` is a phase after which the kernel leaves, for tests. `trace` needs a kernel built to be traced.
        Raises ConfigError for more than MAX_STOP_IDS ids or a limit outside 1 to MAX_LAUNCH_TOKENS.
        """
        if not 1 <= limit <= MAX_LAUNCH_TOKENS:
            raise ConfigError(f"limit is {limit}; one launch makes 1 to {MAX_LAUNCH_TOKENS} tokens")
        if len(stop_ids) > MAX_STOP_IDS:
            raise ConfigError(f"{len(stop_ids)} stop token ids were given; the kernel takes at most {MAX_STOP_IDS}")
        windows, trace = windows or self._windows, trace or self._untraced
        self._words[:limit] = 0
        self._limit = limit
        self._cancel.zero_()
        self.watch.abort.zero_()
        self.watch.records.zero_()
        self.exchange.zero_()
        mode, choose = self._choose.load(choosing, limit)
        if stop_ids:
            self._stop_ids[: len(stop_ids)] = torch.tensor(sorted(stop_ids), dtype=torch.int32)
        args: list[Arg] = [
            self._header(block_pages),
            self._tasks,
            self.packed.arena,
            self.packed.constants,
            self.cache.pages,
            page_table,
            self.exchange,
            torch.tensor(first_tokens, dtype=torch.int32).to(self.device),
            torch.tensor(positions, dtype=torch.int32).to(self.device),
            self._stop_ids,
            len(stop_ids),
            limit,
            self._slots,
            self._cancel,
            self.logits,
            self.logits.shape[1] if want_logits or mode > ChooseMode.GREEDY else 0,
            stop_after,
            min(windows.short, self.shape.stages),
            min(windows.long, self.shape.stages),
            windows.long_phase,
            min(windows.deep, self.shape.stages),
            windows.deep_phase,
            windows.deep_from,
            windows.lead,
            windows.pace,
            trace.words,
            trace.words.shape[2],
            trace.token,
            *choose,
            *self.watch.args,
        ]
        self.kernel.launch(
            self.plan.limits.ctas,
            self.shape.threads,
            args,
            shared_bytes=self.shared_bytes,
            cooperative=True,
            stream=stream,
        )
        if self._end is not None:
            self._end.record(stream or torch.cuda.current_stream(self.device))

    def read(self, index: int, sequence: int = 0) -> Slot | None:
        """Return token `index` of the running launch, None if not all of it is there yet. Makes no CUDA call."""
        word = int(self._words[index, sequence])
        if word >> 32 != index + 1:
            return None
        token_id, last = word & _TOKEN_BITS, bool(word & TOKEN_STOP)
        if word & TOKEN_FAILED:
            return Slot(0, last, Failure(token_id))
        report = self._choose.report(index, sequence)
        return None if report is None else Slot(token_id, last, None, *report)

    def active_neurons(self) -> tuple[float, ...] | None:
        """Return how many neurons of each layer fired, a mean over the tokens of the launch that has ended.

        None if the feed-forwards are dense, or if no token was made.
        """
        made = 0
        while made < self._limit and int(self._words[made, 0]) >> 32 == made + 1:
            made += 1
        if not self.plan.layout.sparse or not made:
            return None
        start = int(self.plan.header["counts_word"])
        counts = self.exchange[start : start + self.plan.config.num_hidden_layers].tolist()
        return tuple(count / made for count in counts)

    def cancel(self) -> None:
        """Ask the running launch to end after the token it is at."""
        self._cancel.fill_(1)

    def ended(self) -> bool:
        """Return whether the launch has ended: all CTAs have left. On the CPU a launch ends before `launch` returns."""
        return self._end is None or self._end.query()

    def check(self) -> None:
        """Raise DeviceError with the table of waits if the launch that has ended was stopped by a stuck wait."""
        self.watch.check(self.kernel.spec.entry)
