"""How much memory a feed-forward's forward and backward take on a GPU, counted without one.

Tensors on PyTorch's meta device have sizes and no values. The GPU's branch runs on them with kernels that do nothing,
and every storage that is alive after an operator counts. What a library takes inside of an operator (cuBLAS: 33 MB on
an H200) does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onekernel.kernels.sparse_training import TrainingKernels, TrainingShape
from onekernel.ops import sparse_training, training_gpu

MB = 1e6
HIDDEN, INNER, TOKENS = 2048, 5632, 16384
INPUTS = 2 * (2 * TOKENS * HIDDEN + 3 * INNER * HIDDEN)
"""x, the gradient of the output, and the weights, bf16."""


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that an operator gave and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._sizes = {held: size for held, size in self._sizes.items() if not held.expired()}
        return sum(self._sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made


class Nothing:
    """A kernel whose launches do nothing."""

    def launch(self, *args: Any, **options: Any) -> None:
        pass


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def made(index: int | None, shape: TrainingShape) -> TrainingKernels:
        return TrainingKernels(shape, lambda spec: Nothing(), sms=132, shared_bytes=232448)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(training_gpu, "_made", made)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())  # knows no meta device
    with torch.no_grad():
        yield


def step(hot_neurons: int) -> tuple[int, int, int]:
    """The peaks of forward and backward, and what is kept between them beside inputs, in bytes."""
    with Alive() as alive:
        shapes = [(TOKENS, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER), (TOKENS, HIDDEN)]
        x, gate, up, down, grad_out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        hot = torch.empty(hot_neurons, dtype=torch.int64, device="meta")
        assert alive.now - hot.nbytes == INPUTS
        out, total, masks, _, hot_first = sparse_training._forward._init_fn(x, gate, up, down, hot, "relu")
        forward, alive.peak = alive.peak, 0
        del out, total, _
        kept = alive.now - INPUTS
        l1 = torch.empty((), device="meta")
        grads = sparse_training._backward._init_fn(grad_out, l1, x, gate, up, down, masks, hot, hot_first, "relu")
        assert [grad.shape for grad in grads] == [x.shape, gate.shape, up.shape, down.shape]
        return forward, alive.peak, kept


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("hot_neurons", "most_mb"),
    [pytest.param(0, 386, id="none"), pytest.param(512, 409, id="0.5 %"), pytest.param(1024, 433, id="1 %")],
)
def test_the_peak_of_a_step(hot_neurons: int, most_mb: float) -> None:
    """With as many hot neurons as `choose_route` takes for skewed nonzeros: so it is for 0.5 and 1 % of them."""
    forward, backward, kept = step(hot_neurons)
    assert max(forward, backward) <= most_mb * MB
    bits, first = TOKENS * INNER // 8, 2 * TOKENS * hot_neurons
    assert kept == bits + first + 8 * hot_neurons


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_count_sees_what_is_there() -> None:
    with Alive() as alive:
        first = torch.empty(1000, dtype=torch.int8, device="meta")
        view, second = first[10:], first + 1
        assert alive.now == 2000
        del first, second
        assert (alive.now, alive.peak, len(view)) == (1000, 2000, 990)
