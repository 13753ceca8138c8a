"""The specs and the host's side of kernels/sparse/train_*.cu: training of an activation-sparse feed-forward.

The product that decides who is active is dense and made before; train_masks.cu keeps a bit of each of its values. From
there on everything is gathered: a CTA per token takes the rows of its active neurons, a CTA per neuron those of its
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.errors import ConfigError

WARP = 32
MOST_THREADS = 512
COLUMNS = 8
"""bf16 values in a vector of 16 bytes."""

MOST_BATCH = 4
"""Rows whose products are summed at a time; three sums each, and a warp has room for 16."""

MOST_HIDDEN = 8192
"""The largest hidden_size that is compiled and looked at for spills."""

MASK_WARPS = 8
MASK_CTAS = 4
"""A multiprocessor: each marks the hot neurons once, and then has some tokens."""

HOT_WARPS = 8
TRANSPOSE_WARPS = 8
TRANSPOSE_BLOCKS = 8
"""Words of the result that a lane writes side by side: a whole sector of 32 bytes."""

SUMS = 16


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """What is compiled in: hidden_size (a multiple of 8), the kind of feed-forward, and how weights' gradients lie."""

    hidden: int
    gated: bool = True
    square: bool = False
    float_gradients: bool = False
    """Gradients of weights in float32; False: bf16, rounded once."""
    most_threads: int = MOST_THREADS

    @property
    def vectors(self) -> int:
        """Vectors of a row that a thread owns: one, if that does not take too many threads."""
        return -(-self.hidden // (COLUMNS * self.most_threads))

    @property
    def threads(self) -> int:
        """Threads of a CTA: as few warps as can own a row."""
        return -(-self.hidden // (COLUMNS * self.vectors * WARP)) * WARP

    def batch(self, rows: int, shared_bytes: int) -> int:
        """Return how many entries of `rows` rows each are summed at a time, with as many on their way beside them."""
        for batch in (MOST_BATCH, 2, 1):
            if self.shared(rows, batch) <= shared_bytes:
                return batch
        raise ConfigError(
            f"hidden_size {self.hidden} needs {self.shared(rows, 1)} bytes of shared memory where a CTA may have "
            f"{shared_bytes}; use the dense route"
        )

    def fits(self, shared_bytes: int) -> bool:
        """Return whether every kernel takes this hidden_size where a CTA may have so much shared memory."""
        return self.hidden <= MOST_HIDDEN and self.shared(3, 1) <= shared_bytes

    def shared(self, rows: int, batch: int) -> int:
        """Return the bytes of shared memory: rows on their way, the list of a segment, sums and counts of warps."""
        warps = self.threads // WARP
        stages = 2 * batch * rows * self.threads * self.vectors * 16
        return stages + self.threads * WARP * 2 + 2 * warps * SUMS * 4 + warps * 4

    def masks(self) -> KernelSpec:
        """Return the kernel that keeps a bit of each value."""
        return KernelSpec(
            file="sparse/train_masks.cu",
            entry="train_masks",
            constants={"MASK_WARPS": MASK_WARPS},
            params=(
                Pointer("values", "bfloat16", ("tokens", "inner")),
                Pointer("hot", "int32", ("hots",), align_bytes=4),
                Pointer("masks", "int32", ("tokens", "words"), align_bytes=4),
                Pointer("counts", "int32", ("tokens",), align_bytes=4),
                Pointer("kept_values", "bfloat16", ("tokens", "width"), align_bytes=2),
                *(Scalar(name, "u32") for name in ("tokens", "inner", "words", "hots", "width")),
            ),
        )

    def hot_forward(self) -> KernelSpec:
        """Return the kernel between the dense products of the forward."""
        return KernelSpec(
            file="sparse/train_hot_forward.cu",
            entry="train_hot_forward",
            constants=self._hot_constants(),
            params=(
                Pointer("first", "bfloat16", ("tokens", "hots")),
                Pointer("inner", "bfloat16", ("tokens", "hots")),
                Pointer("sums", "float32", ("tokens",), align_bytes=4),
                *(Scalar(name, "u32") for name in ("tokens", "hots")),
            ),
        )

    def hot_backward(self) -> KernelSpec:
        """Return the kernel between the dense products of the backward."""
        return KernelSpec(
            file="sparse/train_hot_backward.cu",
            entry="train_hot_backward",
            constants=self._hot_constants(),
            params=(
                Pointer("first", "bfloat16", ("tokens", "hots")),
                Pointer("grads", "bfloat16", ("tokens", "width")),
                Pointer("inner", "bfloat16", ("tokens", "hots")),
                Pointer("l1", "float32", (1,), align_bytes=4),
                *(Scalar(name, "u32") for name in ("tokens", "hots", "width")),
            ),
        )

    def transpose(self) -> KernelSpec:
        """Return the kernel that turns bits by token into bits by neuron."""
        return KernelSpec(
            file="sparse/train_transpose.cu",
            entry="train_transpose",
            constants={"TRANSPOSE_WARPS": TRANSPOSE_WARPS, "TRANSPOSE_BLOCKS": TRANSPOSE_BLOCKS},
            params=(
                Pointer("masks", "int32", ("tokens", "words"), align_bytes=4),
                Pointer("by_neuron", "int32", ("neurons", "blocks"), align_bytes=4),
                Pointer("counts", "int32", ("neurons",), align_bytes=4),
                *(Scalar(name, "u32") for name in ("tokens", "words", "blocks")),
            ),
        )

    def forward(self, batch: int) -> KernelSpec:
        """Return the kernel that makes a token's output."""
        return KernelSpec(
            file="sparse/train_forward.cu",
            entry="train_forward",
            constants=self._constants(batch),
            params=(
                Pointer("x", "bfloat16", ("tokens", self.hidden)),
                Pointer("values", "bfloat16", ("tokens", "inner")),
                Pointer("masks", "int32", ("tokens", "words"), align_bytes=4),
                Pointer("up", "bfloat16", ("inner", self.hidden)),
                Pointer("down", "bfloat16", ("inner", self.hidden)),
                Pointer("sums", "float32", ("tokens",), align_bytes=4),
                Pointer("out", "bfloat16", ("tokens", self.hidden)),
                *(Scalar(name, "u32") for name in ("tokens", "inner", "words", "accumulate")),
            ),
        )

    def backward_tokens(self, batch: int) -> KernelSpec:
        """Return the kernel that makes the gradient of a token's x."""
        return KernelSpec(
            file="sparse/train_tokens.cu",
            entry="train_tokens",
            constants=self._constants(batch),
            params=(
                Pointer("x", "bfloat16", ("tokens", self.hidden)),
                Pointer("grad_out", "bfloat16", ("tokens", self.hidden)),
                Pointer("l1", "float32", (1,), align_bytes=4),
                Pointer("masks", "int32", ("tokens", "words"), align_bytes=4),
                Pointer("gate", "bfloat16", ("inner", self.hidden)),
                Pointer("up", "bfloat16", ("inner", self.hidden)),
                Pointer("down", "bfloat16", ("inner", self.hidden)),
                Pointer("grad_x", "bfloat16", ("tokens", self.hidden)),
                *(Scalar(name, "u32") for name in ("tokens", "words", "accumulate")),
            ),
        )

    def weight_gradients(self, batch: int) -> KernelSpec:
        """Return the kernel that makes the gradients of a neuron's weights."""
        dtype = "float32" if self.float_gradients else "bfloat16"
        names = ("gate_grad", "up_grad", "down_grad")
        return KernelSpec(
            file="sparse/train_weights.cu",
            entry="train_weights",
            constants=self._constants(batch) | {"TRAIN_FLOAT": int(self.float_gradients)},
            params=(
                Pointer("x", "bfloat16", ("tokens", self.hidden)),
                Pointer("grad_out", "bfloat16", ("tokens", self.hidden)),
                Pointer("l1", "float32", (1,), align_bytes=4),
                Pointer("by_neuron", "int32", ("neurons", "blocks"), align_bytes=4),
                Pointer("gate", "bfloat16", ("neurons", self.hidden)),
                Pointer("up", "bfloat16", ("neurons", self.hidden)),
                Pointer("down", "bfloat16", ("neurons", self.hidden)),
                *(Pointer(name, dtype, ("neurons", self.hidden)) for name in names),
                *(Scalar(name, "u32") for name in ("neurons", "blocks")),
            ),
        )

    def _hot_constants(self) -> dict[str, int | str]:
        return {"HOT_WARPS": HOT_WARPS, "TRAIN_GATED": int(self.gated), "TRAIN_SQUARE": int(self.square)}

    def _constants(self, batch: int) -> dict[str, int | str]:
        return {
            "TRAIN_HIDDEN": self.hidden,
            "TRAIN_THREADS": self.threads,
            "TRAIN_VECTORS": self.vectors,
            "TRAIN_BATCH": batch,
            "TRAIN_GATED": int(self.gated),
            "TRAIN_SQUARE": int(self.square),
        }


class TrainingKernels:
    """The kernels of one kind of feed-forward on one device, each loaded when it is first needed.

    `load` makes a kernel of a spec, as for `SparseKernels`. Launches go to the current stream and nothing here waits.
    """

    def __init__(self, shape: TrainingShape, load: Callable[[KernelSpec], Kernel], sms: int, shared_bytes: int) -> None:
        self.shape = shape
        self._load = load
        self._sms = sms
        self._shared_bytes = shared_bytes
        self._loaded: dict[str, Kernel] = {}

    def masks(
        self,
        values: torch.Tensor,
        hot: torch.Tensor,
        masks: torch.Tensor,
        counts: torch.Tensor,
        kept_values: torch.Tensor,
    ) -> None:
        """Write a bit for every value above zero (or NaN) of a neuron that is not hot, and how many a token has in all.

        values: (tokens, inner), inner a multiple of 32; hot: (hots,) int32; masks: (tokens, inner / 32) int32; counts:
        (tokens,) int32; kept_values: (tokens, hots or more), those of the hot neurons and zeros.
        """
        (tokens, inner), words = values.shape, masks.shape[1]
        if tokens:
            grid = min(-(-tokens // MASK_WARPS), MASK_CTAS * self._sms)
            args: list[Arg] = [values, hot, masks, counts, kept_values, tokens, inner, words]
            args += [len(hot), kept_values.shape[1]]
            kernel = self._kernel("masks", self.shape.masks)
            kernel.launch(grid, MASK_WARPS * WARP, args, shared_bytes=4 * words + inner)

    def hot_forward(self, first: torch.Tensor, inner: torch.Tensor, sums: torch.Tensor) -> None:
        """Turn x . up in `inner` into h, and add the sum of |h| to `sums`.

        first, inner: (tokens, hots), hots a multiple of 8; without a gate `first` is x . up and `inner` only written.
        """
        tokens, hots = first.shape
        if tokens:
            grid = min(-(-tokens // HOT_WARPS), 16 * self._sms)
            args: list[Arg] = [first, inner, sums, tokens, hots]
            self._kernel("hot forward", self.shape.hot_forward).launch(grid, HOT_WARPS * WARP, args)

    def hot_backward(self, first: torch.Tensor, grads: torch.Tensor, inner: torch.Tensor, l1: torch.Tensor) -> None:
        """Turn grad_out . down in `inner` into h, and write the gradients of x . gate and x . up side by side.

        first, inner: as in `hot_forward`; grads: (tokens, 2 * hots), its second half x . up before; without a gate
        (tokens, hots).
        """
        tokens, hots = first.shape
        if tokens:
            grid = min(-(-tokens * hots // (8 * HOT_WARPS * WARP)), 16 * self._sms)
            args: list[Arg] = [first, grads, inner, l1, tokens, hots, grads.shape[1]]
            self._kernel("hot backward", self.shape.hot_backward).launch(grid, HOT_WARPS * WARP, args)

    def transpose(self, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bits by neuron, (32 * words, tokens / 32 rounded up to 8) int32, and how many each neuron has."""
        tokens, words = masks.shape
        blocks = -(-tokens // (WARP * TRANSPOSE_BLOCKS)) * TRANSPOSE_BLOCKS
        by_neuron = torch.empty(words * WARP, blocks, dtype=torch.int32, device=masks.device)
        counts = torch.zeros(words * WARP, dtype=torch.int32, device=masks.device)
        if tokens:
            tiles = words * (blocks // TRANSPOSE_BLOCKS)
            args: list[Arg] = [masks, by_neuron, counts, tokens, words, blocks]
            grid = -(-tiles // TRANSPOSE_WARPS)
            self._kernel("transpose", self.shape.transpose).launch(grid, TRANSPOSE_WARPS * WARP, args)
        return by_neuron, counts

    def forward(
        self,
        x: torch.Tensor,
        values: torch.Tensor,
        masks: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        sums: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Write (or add) the active neurons' part to `out`, and the sum of their |h| to `sums`.

        x, out: (tokens, hidden); values, masks: as in `masks`; up, down: (inner, hidden); sums: (tokens,) float32.
        """
        (tokens, inner), rows = values.shape, 2 if self.shape.gated else 1
        args: list[Arg] = [x, values, masks, up, down, sums, out, tokens, inner, masks.shape[1], int(accumulate)]
        self._gather("forward", self.shape.forward, rows, tokens, args)

    def backward_tokens(
        self,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        l1: torch.Tensor,
        masks: torch.Tensor,
        gate: torch.Tensor | None,
        up: torch.Tensor,
        down: torch.Tensor,
        grad_x: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Write (or add) the gradient of x. l1: (1,) float32, the gradient of the sum of all |h|."""
        tokens, rows = len(x), 3 if self.shape.gated else 2
        first = up if gate is None else gate
        args: list[Arg] = [x, grad_out, l1, masks, first, up, down, grad_x, tokens, masks.shape[1], int(accumulate)]
        self._gather("tokens", self.shape.backward_tokens, rows, tokens, args)

    def weight_gradients(
        self,
        x: torch.Tensor,
        grad_out: torch.Tensor,
        l1: torch.Tensor,
        by_neuron: torch.Tensor,
        gate: torch.Tensor | None,
        up: torch.Tensor,
        down: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the gradients of gate, up and down, (neurons, hidden), from the bits by neuron."""
        dtype = torch.float32 if self.shape.float_gradients else torch.bfloat16
        neurons = len(up)
        gate_grad, up_grad, down_grad = (torch.empty(up.shape, dtype=dtype, device=x.device) for _ in range(3))
        first, first_grad = (up, up_grad) if gate is None else (gate, gate_grad)
        args: list[Arg] = [x, grad_out, l1, by_neuron, first, up, down, first_grad, up_grad, down_grad]
        self._gather("weights", self.shape.weight_gradients, 2, neurons, [*args, neurons, by_neuron.shape[1]])
        return None if gate is None else gate_grad, up_grad, down_grad

    def _gather(self, name: str, spec: Callable[[int], KernelSpec], rows: int, ctas: int, args: list[Arg]) -> None:
        if ctas:
            batch = self.shape.batch(rows, self._shared_bytes)
            kernel = self._kernel(name, lambda: spec(batch))
            kernel.launch(ctas, self.shape.threads, args, shared_bytes=self.shape.shared(rows, batch))

    def _kernel(self, name: str, spec: Callable[[], KernelSpec]) -> Kernel:
        kernel = self._loaded.get(name)
        if kernel is None:
            kernel = self._loaded[name] = self._load(spec())
        return kernel
