"""Every instruction of kernels/ptx/ does on the CPU what it does on a GPU, and that is what its comment says."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from onekernel.device.shim_build import Build
from onekernel.device.spec import KERNELS, KernelSpec, Pointer, Scalar

PARAMS = (Scalar("part"), Pointer("in", "uint8", ("in_bytes",)), Pointer("out", "uint8", ("out_bytes",)))
SHARED_BYTES = 2048

Run = Callable[..., torch.Tensor]


@pytest.fixture(params=["one order", "another order"])
def run(request: pytest.FixtureRequest, device, case_root: Path) -> Run:
    """run(part, inputs, out_bytes) -> the bytes that part `part` wrote."""
    spec = KernelSpec("wrappers.cu", "wrappers", params=PARAMS, root=case_root)
    kernel = device.load(spec)
    if device.torch.type == "cpu":
        kernel.seed = {"one order": 1, "another order": 2}[request.param]

    def launch(part: int, data: torch.Tensor, out_bytes: int, grid: int = 1, block: int = 32, cluster: int = 1):
        given = data.contiguous().view(torch.uint8).reshape(-1).to(device.torch)
        out = torch.full((out_bytes,), 0xA5, dtype=torch.uint8, device=device.torch)
        kernel.launch(grid, block, [part, given, out], shared_bytes=SHARED_BYTES, cluster=cluster)
        device.finish()
        data.view(torch.uint8).reshape(-1).copy_(given)
        return out.cpu()

    return launch


NOTHING = torch.zeros(16, dtype=torch.uint8)


def test_bf16_product(run: Run) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    got = run(0, torch.cat([a.reshape(-1), b.reshape(-1)]), 512).view(torch.float32).view(16, 8)
    start = torch.tensor([[1.0, 2.0] * 4] * 8 + [[3.0, 4.0] * 4] * 8, dtype=torch.float64)
    want = a.double() @ b.double() + start
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_byte_products_are_exact(run: Run) -> None:
    torch.manual_seed(0)
    a = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    b = torch.randint(0, 256, (32, 8), dtype=torch.uint8)
    got = run(1, torch.cat([a.reshape(-1), b.reshape(-1)]), 3 * 512).view(torch.int32).view(3, 16, 8)
    a_signed, b_signed = a.view(torch.int8).long(), b.view(torch.int8).long()
    for mine, (left, right) in zip(
        got, [(a_signed, b_signed), (a.long(), b_signed), (a_signed, b.long())], strict=True
    ):
        assert torch.equal(mine.long(), left @ right)


def byte_dot(a: int, b: int, signed: bool) -> int:
    def of(word: int, i: int, signed: bool) -> int:
        byte = word >> 8 * i & 255
        return byte - 256 if signed and byte > 127 else byte

    return -5 + sum(of(a, i, signed) * of(b, i, True) for i in range(4))


def test_exchange_inside_a_warp(run: Run) -> None:
    got = run(2, NOTHING, 32 * 48).view(torch.int32).view(32, 12)
    lanes = torch.arange(32)
    assert torch.equal(got[:, 0].long(), (lanes ^ 5) * 3)
    assert (got[:, 1] == 15).all()
    assert torch.equal(got[:, 2].long(), torch.where(lanes < 28, lanes + 4, lanes) * 3)
    assert (got[:, 3].long() % 2**32 == sum(1 << lane for lane in range(0, 32, 3))).all()
    assert torch.equal(got[:, 4].contiguous().view(torch.float32), (lanes ^ 16).float())
    a = [0x80FF7F01 + lane for lane in range(32)]
    assert got[:, 5].tolist() == [byte_dot(word, 0x01FE037F, True) for word in a]
    assert got[:, 6].tolist() == [byte_dot(word, 0x01FE037F, False) for word in a]
    pairs = torch.stack([1 + lanes.float() * 0.001, -3 - lanes.float() * 0.003], 1).bfloat16()
    assert torch.equal(got[:, 7].contiguous().view(torch.bfloat16).view(32, 2), pairs)
    words = [lane * 0x9E3779B9 % 2**32 for lane in range(32)]
    reduced = (max(words), min((word + 5) % 2**32 for word in words), sum(words) % 2**32)
    assert all(row[8:11] == list(reduced) for row in (got.long() % 2**32).tolist())


def test_barriers(run: Run) -> None:
    got = run(3, NOTHING, 512, block=128).view(torch.int32)
    threads = torch.arange(128)
    assert torch.equal(got.long(), (threads ^ 32) * 7 * 256 + 2 * (threads >= 64))


def test_bulk_copies(run: Run) -> None:
    torch.manual_seed(0)
    data = torch.randint(0, 256, (1536,), dtype=torch.uint8)
    got = run(4, data, 1544, block=64)
    assert torch.equal(got[:1536], data)
    assert got[1536:].view(torch.int32).tolist() == [0, 1]


def test_stores_that_a_bulk_copy_reads(run: Run) -> None:
    got = run(5, torch.zeros(256, dtype=torch.uint8), 256, block=64).view(torch.int32)
    assert torch.equal(got, torch.arange(64, dtype=torch.int32) * 11 + 1)


def test_a_flag_carries_what_was_written_before(run: Run) -> None:
    got = run(6, torch.zeros(12, 16, dtype=torch.int64), 12 * 8, grid=2).view(torch.int64)
    assert got.tolist() == [*range(100, 111), 111 + 5000 + 60000]


def test_counting(run: Run) -> None:
    counters = torch.zeros(2, dtype=torch.int64)
    got = run(7, counters, 3 * 64 * 4, grid=3, block=64).view(torch.int32)
    sums = counters[:1].view(torch.int32).tolist()
    assert sums == [3 * sum(range(64)), 3 * 64]
    assert got.sum() == 1
    assert int(got.argmax()) + 1 == int(counters[1])


def test_sums_of_all_threads(run: Run) -> None:
    total = torch.zeros(2, dtype=torch.int64)
    got = run(12, total, 128 * 4, block=128).view(torch.int32)
    assert int(total[0]) == 128 * 2**40 + sum(range(128))
    assert sorted(got.tolist()) == list(range(128))


def test_quotients_are_rounded_to_nearest(run: Run) -> None:
    """Both on ordinary numbers; `divide` also where they, or their quotient, are huge, tiny or infinite."""
    draw = torch.Generator().manual_seed(2)
    for exponents in (1, 40):
        a, b = torch.randn(2, 128, generator=draw)
        a, b = a * 2.0 ** torch.randint(-30, 30, (128,), generator=draw), b.abs() + 2.0**-exponents
        a[:2] = 0.0
        got = run(13, torch.stack([a, b], dim=1), 128 * 8, block=128).view(torch.float32).view(128, 2)
        assert torch.equal(got, (a / b)[:, None].expand(128, 2))
    ends = torch.tensor([3e38, -3e38, 1e-38, 1e-45, 7e-42, 1.0, 1e30, 2e-44])
    a, b = (x.reshape(-1)[:64].repeat(2) for x in torch.meshgrid(ends, ends, indexing="ij"))
    got = run(13, torch.stack([a, b], dim=1), 128 * 8, block=128).view(torch.float32).view(128, 2)
    assert torch.equal(got[:, 0], a / b)


@pytest.mark.parametrize("cluster", [2, 4])
def test_clusters(run: Run, cluster: int) -> None:
    ctas = 8
    got = run(8, NOTHING, ctas * 32 * 16, grid=ctas, cluster=cluster).view(torch.int32).view(ctas, 32, 4).long()
    rank, lane = torch.arange(ctas).view(-1, 1) % cluster, torch.arange(32)
    before = (rank - 1) % cluster
    assert torch.equal(got[..., 0], 1000 * before + lane)
    assert torch.equal(got[..., 1], 2000 * before + lane)
    assert torch.equal(got[..., 2], 1000 * rank + lane)
    assert torch.equal(got[..., 3], (256 * cluster + rank).expand(ctas, 32))


def test_clocks_go_on(run: Run) -> None:
    assert (run(9, NOTHING, 16).view(torch.int64) > 0).all()


def test_asynchronous_copies(run: Run) -> None:
    data = torch.arange(512, dtype=torch.int32)
    got = run(10, data, 2048, block=64).view(torch.int32).view(2, 64, 4)
    want = data.view(2, 64, 4).clone()
    want[1, 1::2] = 0
    assert torch.equal(got, want)


def test_fragments_of_matrices(run: Run) -> None:
    data = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    plain, transposed = run(11, data, 1024).view(torch.int16).view(2, 32, 4, 2)
    for found, matrices in ((plain, data), (transposed, data.transpose(1, 2))):
        # Lane 4 * group + t holds values 2t and 2t + 1 of row group of each matrix.
        assert torch.equal(found.view(8, 4, 4, 2).permute(2, 0, 1, 3).reshape(4, 8, 8), matrices)


def test_the_portable_fiber_switch(shim, case_root: Path) -> None:
    kernel = shim(KernelSpec("wrappers.cu", "wrappers", params=PARAMS, root=case_root), build=Build.UCONTEXT)
    launch = partial(kernel.launch, shared_bytes=SHARED_BYTES)
    data = torch.arange(1536).to(torch.uint8)
    out = torch.zeros(1544, dtype=torch.uint8)
    launch(1, 64, [4, data, out])
    assert torch.equal(out[:1536], data)
    out = torch.zeros(4 * 32 * 16, dtype=torch.uint8)
    launch(4, 32, [8, NOTHING.clone(), out], cluster=4)
    assert out.view(torch.int32).view(4, 32, 4)[3, 31].tolist() == [2031, 4031, 3031, 1027]


def test_every_wrapper_has_a_case() -> None:
    """A wrapper that no kernel calls would have an untested CPU branch."""
    wrappers = {path: path.read_text() for path in (KERNELS / "ptx").glob("*.cuh")}
    declared = {
        name for text in wrappers.values() for name in re.findall(r"__device__ __forceinline__ [\w* ]+?(\w+)\(", text)
    }
    callers = [*(Path(__file__).parent / "kernels").glob("*.cu"), *KERNELS.parent.rglob("*.cu*")]
    calls = "".join(path.read_text() for path in callers if path not in wrappers)
    assert {name for name in declared if not re.search(rf"\b{name}(<[^;]*?>)?\(", calls)} <= {"bf16_low", "bf16_high"}
