"""The megakernel's choice of tokens alone, on given logits: fast enough for thousands of draws on the shim."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from onekernel.config import Sampling
from onekernel.device.kernel import Kernel
from onekernel.device.spec import KERNELS, KernelSpec, Pointer, Scalar
from onekernel.device.watch import PARAMS, Watch
from onekernel.engine.choosing import ChooseBuffers, Choosing
from onekernel.engine.megakernel import Slot
from onekernel.phases.choose import Choice, TokenCounts, choose
from onekernel.plan.abi import (
    CHOICE_CTA_WORDS,
    CHOICE_FIXED_WORDS,
    CHOICE_SHARED_BYTES,
    HEADER,
    TASK,
    TOKEN_FAILED,
    TOKEN_STOP,
    Failure,
    Kind,
)

LOGPROB = 2e-6
"""What a log probability may differ by from torch's, and as much again for each unit of its size: a few roundings."""

FIRST = 40
"""Where the first chosen token stands."""


def spec(root: Path, *, warps: int = 2, sequences: int = 1) -> KernelSpec:
    """The kernel tests/shim/kernels/choosing.cu; `root`: from `sources`."""
    names = {"MK_HEAD_DIM": 64, "MK_GROUP": 1, "MK_ACTIVATION": 0, "MK_QK_NORM": 0, "MK_STAGES": 1}
    names |= dict.fromkeys(("MK_TRACE", "MK_TERNARY", "MK_SCALE_GROUP", "MK_HEAD_INT8", "MK_SPARSE"), 0)
    return KernelSpec(
        "choosing.cu",
        "choosing",
        constants={**names, "MK_WARPS": warps, "MK_SEQUENCES": sequences},
        root=root,
        params=(
            Pointer("header", "uint8", ("header_bytes",)),
            Pointer("tasks", "uint8", ("task_bytes",)),
            Pointer("given", "float32", ("tokens", "sequences", "vocab")),
            Pointer("exchange", "int64", ("words",)),
            Pointer("positions", "int32", ("sequences",)),
            Pointer("stop_ids", "int32", ("stop_room",)),
            Scalar("stop_count", "u32"),
            Scalar("limit", "u32"),
            Pointer("slots", "int64", ("tokens", "sequences"), pinned=True),
            Pointer("cancel", "int32", (1,), pinned=True, align_bytes=4),
            Pointer("logits", "float32", ("sequences", "vocab")),
            Scalar("vocab", "u32"),
            Scalar("mode", "u32"),
            Pointer("sampling", "uint8", ("sampling_bytes",)),
            Pointer("counts", "int32", ("sequences", "vocab")),
            Pointer("bias", "float32", ("sequences", "vocab")),
            Pointer("allowed", "int32", ("sequences", "allowed_words")),
            Pointer("scores", "float32", ("sequences", "vocab")),
            Pointer("choice", "int64", ("sequences", "choice_words")),
            Pointer("reports", "int64", ("slot_room", "sequences", "report_words"), pinned=True),
            *PARAMS,
        ),
    )


def sources(folder: Path) -> Path:
    """The package's kernel sources, with the test's beside them."""
    for part in ("kernels", "phases"):
        shutil.copytree(KERNELS.parent / part, folder / part, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(Path(__file__).parent / "shim" / "kernels" / "choosing.cu", folder / "kernels")
    return folder / "kernels"


def shares(tiles: int, ctas: int, seed: int | None = None) -> list[tuple[int, int]]:
    """(first, count) of each CTA's tiles of 8 rows: even, or of random sizes and order, some of them none."""
    if seed is None:
        edges = [tiles * i // ctas for i in range(ctas + 1)]
        return [(a, b - a) for a, b in itertools.pairwise(edges)]
    draw = torch.Generator().manual_seed(seed)
    edges = sorted([0, tiles, *torch.randint(tiles + 1, (ctas - 1,), generator=draw).tolist()])
    parts = [(a, b - a) for a, b in itertools.pairwise(edges)]
    return [parts[i] for i in torch.randperm(ctas, generator=draw).tolist()]


@dataclass(slots=True)
class Chooser:
    """A kernel, and how it is launched."""

    load: Callable[[KernelSpec], Kernel]
    spec: KernelSpec
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ctas: int = 3
    split: int | None = None
    """Seed of a random partition."""
    spread: bool = False
    """Whether, in the last launch, all CTAs had to look for a cut together."""
    _kernel: Kernel | None = None

    def slots(
        self,
        given: torch.Tensor,
        choosing: Sequence[Choosing],
        vocab_limit: int | None = None,
        stop_ids: Sequence[int] = (),
        first: int = FIRST,
    ) -> list[list[Slot]]:
        """Choose from given (tokens, sequences, vocab) float32; the first token of each stands at `first`."""
        tokens, sequences, vocab = given.shape
        names = self.spec.constants
        self._kernel = self._kernel or self.load(self.spec)
        header = np.zeros((), HEADER.dtype)
        values = {"phases": 2, "ctas": self.ctas, "vocab_limit": vocab_limit or vocab}
        values["x_at"] = values["partial_at"] = 2 * TASK.dtype.itemsize
        for name, value in {**values, "token_word": 2 * self.ctas * sequences}.items():
            header[name] = value
        tasks = np.zeros((self.ctas, 2), TASK.dtype)
        tasks["kind"] = [Kind.HEAD, Kind.CHOOSE]
        tasks["first"][:, 0], tasks["count"][:, 0] = zip(*shares(-(-vocab // 8), self.ctas, self.split), strict=True)
        tasks["count"][0, 1] = 1
        plan: Any = SimpleNamespace(
            limits=SimpleNamespace(sequences=sequences),
            config=SimpleNamespace(vocab_size=vocab),
            header=header,
            choice_words=CHOICE_FIXED_WORDS + self.ctas * CHOICE_CTA_WORDS,
        )
        buffers = ChooseBuffers(plan, self.device)
        _, args = buffers.load(choosing, tokens)
        threads = int(names["MK_WARPS"]) * 32
        watch = Watch.create(self.device, self.ctas, threads)
        pinned = self.device.type == "cuda"
        slots = torch.zeros(tokens, sequences, dtype=torch.int64, pin_memory=pinned)

        def there(values: torch.Tensor) -> torch.Tensor:
            return values.to(self.device)

        self._kernel.launch(
            self.ctas,
            threads,
            [
                there(torch.from_numpy(np.frombuffer(header.tobytes(), np.uint8).copy())),
                there(torch.from_numpy(tasks.view(np.uint8).reshape(-1).copy())),
                there(given.contiguous()),
                torch.zeros(2 * self.ctas * sequences + sequences, dtype=torch.int64, device=self.device),
                there(torch.full((sequences,), first - 1, dtype=torch.int32)),
                there(torch.tensor([*stop_ids, 0], dtype=torch.int32)),
                len(stop_ids),
                tokens,
                slots,
                torch.zeros(1, dtype=torch.int32, pin_memory=pinned),
                torch.full((sequences, vocab), torch.nan, device=self.device),
                vocab,
                *args,
                *watch.args,
            ],
            shared_bytes=threads * 32 + 2 * TASK.dtype.itemsize + CHOICE_SHARED_BYTES + 4096,
            cooperative=True,
        )
        if pinned:
            torch.cuda.synchronize(self.device)
        watch.check("choosing")
        arrived = buffers._words[:, CHOICE_FIXED_WORDS + 50 :: CHOICE_CTA_WORDS]
        self.spread = bool((arrived != 0).any())
        return [[_slot(slots, buffers, i, s) for i in range(tokens) if int(slots[i, s])] for s in range(sequences)]

    def choices(self, given: torch.Tensor, choosing: Choosing, **options: Any) -> list[Choice]:
        """The choices of one sequence from given (tokens, vocab)."""
        slots = self.slots(given[:, None], [choosing], **options)[0]
        assert all(slot.failure is None for slot in slots), slots
        return [Choice(slot.token_id, slot.logprob, slot.top) for slot in slots]

    def failure(self, given: torch.Tensor, choosing: Choosing) -> Failure | None:
        """Why there is no first token."""
        return self.slots(given[:1, None], [choosing])[0][0].failure


def _slot(slots: torch.Tensor, buffers: ChooseBuffers, index: int, sequence: int) -> Slot:
    word = int(slots[index, sequence])
    assert word >> 32 == index + 1
    token, last = word & (TOKEN_FAILED - 1), bool(word & TOKEN_STOP)
    if word & TOKEN_FAILED:
        return Slot(0, last, Failure(token))
    report = buffers.report(index, sequence)
    assert report is not None
    return Slot(token, last, None, *report)


def reference(given: torch.Tensor, choosing: Choosing, vocab_limit: int | None = None) -> list[Choice]:
    """What phases/choose/reference.py makes of the same, token after token."""
    vocab = given.shape[-1]
    counts = TokenCounts.start(choosing.tokens, choosing.prompt_tokens, vocab)
    made = []
    for index, logits in enumerate(given):
        mask = choosing.mask
        sampling, limit = choosing.sampling, vocab_limit or vocab
        made.append(choose(logits, sampling, FIRST + index, counts, vocab_limit=limit, mask=mask))
        counts.add(made[-1].token_id)
    return made


def compare(ours: Sequence[Choice], theirs: Sequence[Choice]) -> None:
    """Demand the same tokens, bit for bit, and the same log probabilities within LOGPROB."""
    assert [choice.token_id for choice in ours] == [choice.token_id for choice in theirs]
    for mine, want in zip(ours, theirs, strict=True):
        if want.logprob is None:
            assert mine.logprob is None and mine.top == ()
            continue
        assert mine.logprob is not None
        pairs = [(mine.logprob, want.logprob), *((a[1], b[1]) for a, b in zip(mine.top, want.top, strict=True))]
        for a, b in pairs:
            assert abs(a - b) <= LOGPROB * (1 + abs(b)), (a, b)
        for place, ((ours_id, _), (their_id, value)) in enumerate(zip(mine.top, want.top, strict=True)):
            if ours_id != their_id:  # the reference has rounded two log probabilities to one number
                near = [b for n, (_, b) in enumerate(want.top) if n != place]
                assert min(abs(b - value) for b in near) <= LOGPROB * (1 + abs(value)), (mine.top, want.top)


def peaked(tokens: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Normal logits, (tokens, vocab)."""
    return torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    """The same with another seed."""
    return replace(sampling, seed=seed)
