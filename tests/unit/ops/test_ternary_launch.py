"""What is launched, seen by kernels that only write down what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from onekernel.device.arguments import bind
from onekernel.device.spec import KernelSpec
from onekernel.ops.ternary_launch import TernaryLauncher
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.packed import PackedTernary
from onekernel.weights.ternary.tensor_core import TensorCoreTiles
from tests.ternary import random_activations, random_matrix


@dataclass
class Recorded:
    """Stands for a loaded kernel: its arguments are checked, and nothing runs."""

    spec: KernelSpec
    launches: list[tuple[int, list[Any]]] = field(default_factory=list)

    def launch(self, grid: int, block: int, args: Sequence[Any], **options: Any) -> None:
        bind(self.spec, torch.device("cpu"), args)
        self.launches.append((grid, list(args)))


@dataclass
class Loader:
    loaded: list[Recorded] = field(default_factory=list)

    def __call__(self, spec: KernelSpec) -> Recorded:
        self.loaded.append(Recorded(spec))
        return self.loaded[-1]


def tokens_of(loader: Loader, entry: str) -> list[int]:
    """The tokens of each launch of an entry."""
    return [len(args[2]) for kernel in loader.loaded if kernel.spec.entry == entry for _, args in kernel.launches]


@pytest.mark.parametrize(("tokens", "parts"), [(1, [1]), (8, [8]), (9, [8, 1]), (16, [8, 8])])
@pytest.mark.parametrize(("layout", "entry"), [(TensorCoreTiles, "ternary_decode"), (Blocks16x32, "ternary_blocks")])
def test_a_few_tokens_go_eight_at_a_time(
    layout: type[PackedTernary], entry: str, tokens: int, parts: list[int]
) -> None:
    loader = Loader()
    weight = layout.pack(random_matrix(40, 256))
    out = TernaryLauncher(loader, sms=132).linear(*random_activations(tokens, 256), weight, torch.float32)
    assert out.shape == (tokens, 40)
    assert tokens_of(loader, entry) == parts


def test_many_tokens_are_one_launch_of_prefill_and_of_blocks_several() -> None:
    loader = Loader()
    launcher, matrix = TernaryLauncher(loader, sms=132), random_matrix(40, 256)
    launcher.linear(*random_activations(100, 256), TensorCoreTiles.pack(matrix), torch.bfloat16)
    assert tokens_of(loader, "ternary_prefill") == [100]
    launcher.linear(*random_activations(20, 256), Blocks16x32.pack(matrix), torch.bfloat16)
    assert tokens_of(loader, "ternary_blocks") == [8, 8, 4]


def test_activations_of_odd_rows_are_padded_with_zeros() -> None:
    loader = Loader()
    x, inverse = random_activations(2, 100)
    TernaryLauncher(loader, sms=132).linear(x, inverse, TensorCoreTiles.pack(random_matrix(16, 100)), torch.float32)
    [(_, args)] = loader.loaded[0].launches
    assert args[2].shape == (2, 112) and not args[2][:, 100:].any() and torch.equal(args[2][:, :100], x)


def test_no_tokens_need_no_kernel() -> None:
    loader = Loader()
    launcher = TernaryLauncher(loader, sms=132)
    weight = TensorCoreTiles.pack(random_matrix(16, 128))
    assert launcher.linear(*random_activations(0, 128), weight, torch.float32).shape == (0, 16)
    assert launcher.quantise(torch.zeros(0, 128), None, 1e-5)[0].shape == (0, 128)
    assert loader.loaded == []


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("layout", [TensorCoreTiles, Blocks16x32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_compiled_after_all_was_loaded(
    layout: type[PackedTernary], group: int | None, dtype: torch.dtype
) -> None:
    """Not in the middle of an answer, and not while a graph is recorded."""
    loader = Loader()
    launcher = TernaryLauncher(loader, sms=132)
    weight = layout.pack(random_matrix(2560, 256, group=group))
    launcher.load_all(weight, dtype)
    before = len(loader.loaded)
    for tokens in (*range(1, 20), 31, 32, 33, 64, 65, 127, 128, 200, 300, 512, 1000, 2048):
        launcher.linear(*random_activations(tokens, 256), weight, dtype)
    launcher.quantise(torch.zeros(3, 256, dtype=dtype), None, 1e-5)
    launcher.quantise(torch.zeros(3, 256, dtype=dtype), torch.ones(256), 1e-5)
    assert len(loader.loaded) == before
