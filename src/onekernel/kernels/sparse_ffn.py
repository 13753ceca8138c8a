"""The specs and the host's side of kernels/sparse/: an activation-sparse feed-forward for many tokens.

The gate's product is dense and made before (by PyTorch); everything here starts from its values, before ReLU. Weights
and activations are bf16, hidden_size a multiple of 64 and intermediate_size of 16; `ops/sparse.py` pads what is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.errors import ConfigError

Activation = Literal["relu", "relu2"]

TOTALS = 4
PACKED, OVERFLOWED, GATHERED, SLICED = range(TOTALS)
"""Places in `totals`: nonzeros packed, rows that overflowed, rows through gather.cu, rows through down.cu."""

HIDDEN_MULTIPLE = 64
INNER_MULTIPLE = 16
MAX_INNER = (1 << 16) - INNER_MULTIPLE
"""A word names the neuron in 16 bits, and down.cu needs one number more, for none."""

MOST_DOWN_COLUMNS = 16
"""Columns of hidden_size that a CTA of down.cu finishes; half as many where more do not fit."""

SHARED_BYTES = 227 * 1024
"""What a CTA may have on Hopper."""

PARTIAL_BYTES = 1 << 30
"""Most bytes of partial sums at a time; more tokens are done in turns, each of which loads the weights anew."""


@dataclass(frozen=True, slots=True)
class SparseShape:
    """What is compiled in: the kind of feed-forward, and what an H200 may want otherwise (benchmarks/sparse.py)."""

    gated: bool = True
    activation: Activation = "relu"
    up_columns: int = 64
    up_warps: int = 24
    down_warps: int = 32
    pack_warps: int = 8
    gather_warps: int = 16

    @property
    def _square(self) -> int:
        return int(self.activation == "relu2")

    def pack(self) -> KernelSpec:
        """Return the kernel that turns gate values into TwELL words."""
        return KernelSpec(
            file="sparse/pack.cu",
            entry="sparse_pack",
            constants={"PACK_WARPS": self.pack_warps, "PACK_SQUARE": 0 if self.gated else self._square},
            params=(
                Pointer("gate", "bfloat16", ("rows", "width")),
                Pointer("words", "int32", ("rows", "tiles", "capacity")),
                Pointer("counts", "int32", ("rows", "tiles"), align_bytes=4),
                Pointer("overflowed", "int32", ("rows",), align_bytes=4),
                Pointer("totals", "int32", (TOTALS,)),
                *(Scalar(name, "u32") for name in ("rows", "width", "first", "tile_columns", "tiles", "capacity")),
            ),
        )

    def up(self) -> KernelSpec:
        """Return the kernel that multiplies x with the up rows of active neurons."""
        names = ("tokens", "hidden", "inner", "first", "tile_columns", "tiles", "capacity", "parts")
        return KernelSpec(
            file="sparse/up.cu",
            entry="sparse_up",
            constants={"UP_WARPS": self.up_warps, "UP_COLUMNS": self.up_columns},
            params=(
                Pointer("x", "bfloat16", ("tokens", "hidden")),
                Pointer("up", "bfloat16", ("inner", "hidden")),
                Pointer("words", "int32", ("tokens", "tiles", "capacity")),
                Pointer("counts", "int32", ("tokens", "tiles"), align_bytes=4),
                Pointer("partial", "float32", ("slices", "tokens", "tiles", "capacity")),
                *(Scalar(name, "u32") for name in names),
            ),
        )

    def combine(self) -> KernelSpec:
        """Return the kernel that adds up the slices of `up` and makes a list per token."""
        return KernelSpec(
            file="sparse/combine.cu",
            entry="sparse_combine",
            constants={"COMBINE_WARPS": self.pack_warps, "COMBINE_SQUARE": self._square},
            params=(
                Pointer("words", "int32", ("tokens", "tiles", "capacity")),
                Pointer("counts", "int32", ("tokens", "tiles"), align_bytes=4),
                Pointer("partial", "float32", ("slices", "tokens", "tiles", "capacity")),
                Pointer("lists", "int32", ("tokens", "room"), align_bytes=4),
                Pointer("lengths", "int32", ("tokens",), align_bytes=4),
                *(Scalar(name, "u32") for name in ("tokens", "slices", "tiles", "capacity")),
            ),
        )

    def down(self, columns: int) -> KernelSpec:
        """Return the kernel that multiplies the lists with the down rows, `columns` (8 or 16) of them in a CTA."""
        names = ("tokens", "hidden", "inner", "first", "room", "accumulate", "parts")
        return KernelSpec(
            file="sparse/down.cu",
            entry="sparse_down",
            constants={"DOWN_WARPS": self.down_warps, "DOWN_COLUMNS": columns},
            params=(
                Pointer("lists", "int32", ("tokens", "room"), align_bytes=4),
                Pointer("lengths", "int32", ("tokens",), align_bytes=4),
                Pointer("down", "bfloat16", ("inner", "hidden")),
                Pointer("out", "bfloat16", ("tokens", "hidden")),
                Pointer("totals", "int32", (TOTALS,)),
                *(Scalar(name, "u32") for name in names),
            ),
        )

    def gather(self) -> KernelSpec:
        """Return the kernel that takes a token at a time, whole."""
        return KernelSpec(
            file="sparse/gather.cu",
            entry="sparse_gather",
            constants={
                "GATHER_WARPS": self.gather_warps,
                "GATHER_SQUARE": self._square,
                "GATHER_GATED": int(self.gated),
            },
            params=(
                Pointer("x", "bfloat16", ("tokens", "hidden")),
                Pointer("gate", "bfloat16", ("tokens", "width")),
                Pointer("up", "bfloat16", ("inner", "hidden")),
                Pointer("down", "bfloat16", ("inner", "hidden")),
                Pointer("overflowed", "int32", ("tokens",), align_bytes=4),
                Pointer("out", "bfloat16", ("tokens", "hidden")),
                Pointer("totals", "int32", (TOTALS,)),
                *(Scalar(name, "u32") for name in ("tokens", "hidden", "width", "first", "all")),
            ),
        )

    def product(self) -> KernelSpec:
        """Return the kernel that makes activate(gate) * up of all neurons."""
        return KernelSpec(
            file="sparse/gated.cu",
            entry="gated",
            constants={"GATED_THREADS": 256, "GATED_SQUARE": self._square, "GATED_UP": int(self.gated)},
            params=(
                Pointer("gate", "bfloat16", ("tokens", "width")),
                Pointer("up", "bfloat16", ("tokens", "columns")),
                *(Scalar(name, "u32") for name in ("tokens", "width", "columns")),
            ),
        )


@dataclass(frozen=True, slots=True)
class Slices:
    """How the sparse neurons, those from `first` on, are laid over CTAs."""

    first: int
    tile_columns: int
    tiles: int
    capacity: int
    down_columns: int

    @classmethod
    def plan(
        cls,
        shape: SparseShape,
        hidden: int,
        inner: int,
        *,
        first: int = 0,
        capacity: int = 64,
        shared_bytes: int = SHARED_BYTES,
    ) -> Slices:
        """Return tiles of equal width that fit shared memory; `capacity` is rounded up to even and down to the tile.

        Raises ConfigError if `first` is no multiple of 16 below `inner`, or if no form of down.cu can hold the neurons.
        """
        if first % INNER_MULTIPLE or not 0 <= first < inner:
            raise ConfigError(f"{first} dense neurons of {inner}; give a multiple of {INNER_MULTIPLE} below that")
        rows = inner - first
        forms = (MOST_DOWN_COLUMNS, MOST_DOWN_COLUMNS // 2)
        fitting = [columns for columns in forms if (rows + 1) * columns * 2 <= shared_bytes]
        if not fitting:
            raise ConfigError(
                f"{rows} sparse neurons do not fit: {shared_bytes} bytes of shared memory hold {shared_bytes // 16 - 1}"
                f"; multiply more of them densely, or use the gather or dense route"
            )
        most = shared_bytes // (2 * shape.up_columns) // INNER_MULTIPLE * INNER_MULTIPLE if shape.gated else rows
        tiles = -(-rows // most)
        tile_columns = -(-rows // tiles // INNER_MULTIPLE) * INNER_MULTIPLE
        return cls(first, tile_columns, tiles, min(capacity + capacity % 2, tile_columns), fitting[0])


class SparseKernels:
    """The kernels of one kind of feed-forward on one device, each loaded when it is first needed.

    `load` makes a kernel of a spec (`device.cuda_kernel.load_kernel`, or the shim's class); `sms` is how many CTAs run
    at once, `shared_bytes` what each may have. Launches go to the current stream and nothing here waits.
    """

    def __init__(
        self, shape: SparseShape, load: Callable[[KernelSpec], Kernel], sms: int, shared_bytes: int = SHARED_BYTES
    ) -> None:
        self.shape = shape
        self.shared_bytes = shared_bytes
        self._load = load
        self._sms = sms
        self._loaded: dict[tuple[str, int], Kernel] = {}

    def sliced(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        slices: Slices,
        totals: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Write (or with `accumulate` add) the sparse neurons' part to `out`, rescuing the rows that overflow.

        x, out: (tokens, hidden); gate: (tokens, inner), the values before ReLU; up, down: (inner, hidden), of which
        `up` is not looked at without a gate; totals: (4,) int32, added to.
        """
        hidden = x.shape[1]
        up_slices = hidden // self.shape.up_columns if self.shape.gated else 1
        words_bytes = 4 * slices.tiles * slices.capacity
        turn = max(PARTIAL_BYTES // (words_bytes * up_slices), 8)
        for begin in range(0, len(x), turn):
            part = slice(begin, begin + turn)
            self._turn(x[part], gate[part], up, down, slices, totals, out[part], accumulate=accumulate)

    def gather(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        totals: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the whole feed-forward of every token to `out`, a CTA per token; tensors as in `sliced`."""
        unused = torch.empty(len(x), dtype=torch.int32, device=x.device)
        self._gather(len(x), x, gate, up, down, unused, totals, out, first=0, every=True)

    def product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return activate(gate) * up for the first columns of `gate`, in the place of `up`.

        up: (tokens, columns); without a gate what it holds does not matter.
        """
        tokens, columns = up.shape
        self._launch(self.shape.product, min(tokens, 16 * self._sms), 256, [gate, up, tokens, gate.shape[1], columns])
        return up

    def _turn(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        slices: Slices,
        totals: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        shape, device = self.shape, x.device
        (tokens, hidden), inner = x.shape, gate.shape[1]
        first, tiles, capacity = slices.first, slices.tiles, slices.capacity
        words = torch.empty(tokens, tiles, capacity, dtype=torch.int32, device=device)
        counts = torch.empty(tokens, tiles, dtype=torch.int32, device=device)
        overflowed = torch.empty(tokens, dtype=torch.int32, device=device)
        grid = min(-(-tokens // shape.pack_warps), 8 * self._sms)
        numbers = (tokens, inner, first, slices.tile_columns, tiles, capacity)
        self._launch(shape.pack, grid, shape.pack_warps * 32, [gate, words, counts, overflowed, totals, *numbers])
        lists, lengths = words.view(tokens, -1), counts.view(-1)
        if shape.gated:
            lists, lengths = self._lists(x, up, words, counts, slices)
        columns = slices.down_columns
        parts = self._parts(hidden // columns, tokens, shape.down_warps)
        self._launch(
            shape.down,
            parts * (hidden // columns),
            shape.down_warps * 32,
            [lists, lengths, down, out, totals, tokens, hidden, inner, first, lists.shape[1], int(accumulate), parts],
            shared_bytes=(inner - first + 1) * columns * 2,
            form=columns,
        )
        rescuers = min(tokens, 2 * self._sms)
        self._gather(rescuers, x, gate, up, down, overflowed, totals, out, first=first, every=False)

    def _lists(
        self, x: torch.Tensor, up: torch.Tensor, words: torch.Tensor, counts: torch.Tensor, slices: Slices
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return per token its words (neuron - first, activate(gate) * up) and how many there are."""
        shape, (tokens, hidden) = self.shape, x.shape
        first, tiles, capacity = slices.first, slices.tiles, slices.capacity
        up_slices = hidden // shape.up_columns
        partial = torch.empty(up_slices, tokens, tiles, capacity, device=x.device)
        parts = self._parts(tiles * up_slices, tokens, shape.up_warps)
        numbers = (tokens, hidden, len(up), first, slices.tile_columns, tiles, capacity, parts)
        self._launch(
            shape.up,
            parts * tiles * up_slices,
            shape.up_warps * 32,
            [x, up, words, counts, partial, *numbers],
            shared_bytes=slices.tile_columns * shape.up_columns * 2,
        )
        lists = torch.empty(tokens, tiles * capacity, dtype=torch.int32, device=x.device)
        lengths = torch.empty(tokens, dtype=torch.int32, device=x.device)
        self._launch(
            shape.combine,
            min(-(-tokens // shape.pack_warps), 8 * self._sms),
            shape.pack_warps * 32,
            [words, counts, partial, lists, lengths, tokens, up_slices, tiles, capacity],
        )
        return lists, lengths

    def _gather(
        self,
        ctas: int,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        overflowed: torch.Tensor,
        totals: torch.Tensor,
        out: torch.Tensor,
        *,
        first: int,
        every: bool,
    ) -> None:
        warps, (tokens, hidden) = self.shape.gather_warps, x.shape
        self._launch(
            self.shape.gather,
            ctas,
            warps * 32,
            [x, gate, up, down, overflowed, out, totals, tokens, hidden, gate.shape[1], first, int(every)],
            shared_bytes=hidden * 6 + warps * 32 * 8 * 8 + warps * 8,
        )

    def _parts(self, ctas: int, tokens: int, warps: int) -> int:
        """Return into how many shares to cut the tokens so that `ctas` CTAs each fill the device, none idle."""
        return max(1, min(self._sms // ctas, -(-tokens // (warps * 8))))

    def _launch(
        self,
        spec: Callable[..., KernelSpec],
        grid: int,
        threads: int,
        args: list[Arg],
        shared_bytes: int = 0,
        form: int = 0,
    ) -> None:
        """Launch the kernel of a spec's function; `form` is its argument, if it takes one."""
        key = (spec.__name__, form)
        kernel = self._loaded.get(key)
        if kernel is None:
            kernel = self._loaded[key] = self._load(spec(form) if form else spec())
        kernel.launch(grid, threads, args, shared_bytes=shared_bytes)
