"""The spec and the host's side of ring.cu: a chain of matrix-vector products in one persistent kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.device.watch import PARAMS as WATCH_PARAMS
from onekernel.device.watch import Watch
from onekernel.errors import ConfigError

TILE_ROWS = 8
TILE_COLUMNS = 64
TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2


@dataclass(frozen=True, slots=True)
class RingShape:
    """The compiled-in shape: warps that compute, weight tiles of each of them in a stage, stages of the ring."""

    warps: int = 16
    tiles: int = 1
    stages: int = 12

    @property
    def threads(self) -> int:
        """Threads of a CTA: the computing warps and the one that loads."""
        return (self.warps + 1) * 32

    @property
    def stage_bytes(self) -> int:
        """Bytes of weights in a stage."""
        return self.warps * self.tiles * TILE_BYTES

    def spec(self) -> KernelSpec:
        """Return the kernel for this shape."""
        return KernelSpec(
            file="ring.cu",
            entry="ring",
            constants={"RING_WARPS": self.warps, "RING_TILES": self.tiles, "RING_STAGES": self.stages},
            params=(
                Pointer("table", "int64", ("phases", 4)),
                Scalar("phases", "u32"),
                Pointer("weights", "uint8", ("weight_bytes",)),
                Pointer("exchange", "int64", (2, "words")),
                Scalar("words", "u32"),
                Pointer("out", "float32", ("tokens", "out_rows")),
                Scalar("tokens", "u32"),
                Scalar("out_rows", "u32"),
                Scalar("columns", "u32"),
                Scalar("window", "u32"),
                *WATCH_PARAMS,
            ),
        )


@dataclass(frozen=True, slots=True)
class RingPhase:
    """One product: where its packed weights begin, its size in tiles, and how many values it takes."""

    offset_bytes: int
    row_tiles: int
    k_tiles: int
    inputs: int


@dataclass(frozen=True, slots=True)
class RingChain:
    """Phases over one buffer of weights; the last one's rows are the first one's inputs."""

    phases: tuple[RingPhase, ...]
    weights: torch.Tensor

    def __post_init__(self) -> None:
        for before, phase in zip((self.phases[-1], *self.phases), self.phases, strict=False):
            if phase.inputs != before.row_tiles * TILE_ROWS:
                raise ConfigError(
                    f"a phase takes {phase.inputs} values after one of {before.row_tiles * TILE_ROWS} rows"
                )

    @classmethod
    def of(cls, packed: Sequence[torch.Tensor]) -> RingChain:
        """Return the chain of packed matrices (row tiles, column tiles, 512), each as wide as the last is high."""
        phases, offset = [], 0
        for before, matrix in zip((packed[-1], *packed), packed, strict=False):
            row_tiles, k_tiles, _ = matrix.shape
            phases.append(RingPhase(offset, row_tiles, k_tiles, before.shape[0] * TILE_ROWS))
            offset += row_tiles * k_tiles * TILE_BYTES
        return cls(tuple(phases), torch.cat([matrix.reshape(-1).view(torch.uint8) for matrix in packed]))

    @property
    def columns(self) -> int:
        """Room for the values of the widest phase, in whole tiles."""
        tiles = max(max(phase.k_tiles, -(-phase.inputs // TILE_COLUMNS)) for phase in self.phases)
        return tiles * TILE_COLUMNS

    @property
    def out_rows(self) -> int:
        """Rows of the last phase, padded to whole tiles."""
        return self.phases[-1].row_tiles * TILE_ROWS

    def shared_bytes(self, shape: RingShape, ctas: int) -> int:
        """Return the dynamic shared memory of a CTA: ring, tasks, values, partial sums, in ring.cu's order."""
        ring = shape.stages * (shape.stage_bytes + 16)
        tasks = 24 * (len(self.phases) + len(self.phases) % 2)
        rows = max(-(-phase.row_tiles // ctas) for phase in self.phases) * TILE_ROWS
        return ring + tasks + 2 * self.columns + 4 * shape.warps * rows

    def prepare(
        self,
        kernel: Kernel,
        shape: RingShape,
        ctas: int,
        first: torch.Tensor,
        tokens: int,
        watch: Watch,
        window: int = 2,
    ) -> RingRun:
        """Return the launch of `tokens` tokens on `ctas` CTAs, from the first phase's bf16 inputs.

        Raises ConfigError for a window outside the ring.
        """
        if not 1 <= window <= shape.stages:
            raise ConfigError(f"window is {window}; it must be 1 to {shape.stages}, the stages of the ring")
        device = self.weights.device
        words = max(phase.inputs for phase in self.phases) // 2
        cleared = torch.zeros(2, words, dtype=torch.int64, device=device)
        pairs = first.to(torch.bfloat16).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        cleared[0, : len(pairs)] = pairs | 1 << 32
        exchange = torch.empty_like(cleared)
        table = [(phase.offset_bytes, phase.row_tiles, phase.k_tiles, phase.inputs) for phase in self.phases]
        out = torch.full((tokens, self.out_rows), torch.nan, device=device)
        args: tuple[Arg, ...] = (
            torch.tensor(table, dtype=torch.int64).to(device),
            len(table),
            self.weights,
            exchange,
            words,
            out,
            tokens,
            self.out_rows,
            self.columns,
            window,
            *watch.args,
        )
        return RingRun(kernel, ctas, shape.threads, self.shared_bytes(shape, ctas), args, cleared, exchange, out)


@dataclass(frozen=True, slots=True)
class RingRun:
    """A prepared launch; it can be started again once it has ended."""

    kernel: Kernel
    ctas: int
    threads: int
    shared_bytes: int
    args: tuple[Arg, ...]
    cleared: torch.Tensor
    """The exchange buffer before a launch: zeros, and the first input with tag 1."""
    exchange: torch.Tensor
    out: torch.Tensor
    """(tokens, rows) float32: the last phase's results."""

    def start(self) -> torch.Tensor:
        """Clear the exchange and start the kernel, both on the current stream; returns `out`."""
        self.exchange.copy_(self.cleared)
        self.kernel.launch(self.ctas, self.threads, self.args, shared_bytes=self.shared_bytes, cooperative=True)
        return self.out
