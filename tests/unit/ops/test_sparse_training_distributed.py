"""Under DDP and FSDP2, two processes on the sparse route have the gradients that one process has of all tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onekernel.ops.sparse_training import SparseFFN, TrainingRoute, l1_loss

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from tests.unit.ops.test_sparse_training_distributed import loss_of, made, tokens

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
for way, wrap in {"ddp": DistributedDataParallel, "fsdp2": fully_shard}.items():
    ffn = made()
    run = wrap(ffn)
    for _ in range(2):  # accumulated over two micro-batches
        (loss_of(run, tokens()[rank::2]) / 2).backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in ffn.parameters()]
    if rank == 0:
        torch.save(grads, f"{folder}/{way}.pt")
dist.destroy_process_group()
"""


def made() -> SparseFFN:
    torch.manual_seed(0)
    ffn = SparseFFN(24, 70)
    ffn.route = TrainingRoute("sparse", torch.tensor([2, 60]))
    return ffn


def tokens() -> torch.Tensor:
    return torch.randn(18, 24, generator=torch.Generator().manual_seed(1))


def loss_of(run: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = run(x)
    return found.out.square().mean() + l1_loss([found.penalty], 0.1)


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)] for rank in range(2)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[3]) for command in commands]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    alone = made()
    loss_of(alone, tokens()).backward()
    for way in ("ddp", "fsdp2"):
        for got, parameter in zip(torch.load(tmp_path / f"{way}.pt"), alone.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)
