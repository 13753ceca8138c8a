"""The kernels that measure the machine read what they claim to read, and hand over what they claim to hand over."""

from __future__ import annotations

import pytest
import torch

from onekernel.device.watch import Watch
from onekernel.errors import DeviceError
from onekernel.kernels.machine import HOP_THREADS, READ_ALL, READ_THREADS, cluster_hop, hop_shared_bytes


@pytest.mark.parametrize("vectors", [5, 4096, 20_011])
def test_every_vector_is_read_once(device, vectors: int) -> None:
    data = torch.randint(-(2**31), 2**31 - 1, (vectors, 4), dtype=torch.int32, device=device.torch)
    sums = torch.zeros(2 * READ_THREADS, dtype=torch.int32, device=device.torch)
    times = torch.zeros(2, 2, dtype=torch.int64, device=device.torch)
    device.load(READ_ALL).launch(2, READ_THREADS, [data, vectors, sums, times])
    want = data[0, 0] ^ data[0, 0]
    for value in data.reshape(-1).cpu():
        want = want ^ value.to(want.device)
    got = 0
    for value in sums.tolist():
        got ^= value
    assert got == int(want)
    assert (times[:, 0] > 0).all(), "cycles go on"


def total(words: int, rounds: int) -> int:
    """What the threads of one CTA sum up to, modulo 2^32: `hop_value` in cluster_hop.cu."""
    return sum(r * 40503 + i * 9973 for r in range(rounds) for i in range(words)) % 2**32


def hop(
    kernel, device: torch.device, cluster: int, words: int, rounds: int, max_turns: int = 4_000_000
) -> tuple[list[int], Watch]:
    ctas = 2 * cluster
    watch = Watch.create(device, ctas, HOP_THREADS, max_turns)
    sums = torch.zeros(ctas * HOP_THREADS, dtype=torch.int32, device=device)
    kernel.launch(
        ctas,
        HOP_THREADS,
        [words, rounds, sums, *watch.args],
        shared_bytes=hop_shared_bytes(words),
        cluster=cluster,
    )
    return [int(part) % 2**32 for part in sums.cpu().view(ctas, HOP_THREADS).long().sum(1)], watch


@pytest.mark.parametrize(
    ("entry", "cluster"), [("cluster_hop_tagged", 1), ("cluster_hop_tagged", 4), ("cluster_hop_async", 4)]
)
def test_every_value_arrives_in_every_round(device, entry: str, cluster: int) -> None:
    sums, watch = hop(device.load(cluster_hop(entry)), device.torch, cluster, words=40, rounds=5)
    watch.check(entry)
    assert sums == [total(40, 5)] * (2 * cluster)


def test_asynchronous_stores_need_a_cluster(shim) -> None:
    with pytest.raises(DeviceError, match="an asynchronous store needs a launch with clusters"):
        hop(shim(cluster_hop("cluster_hop_async")), torch.device("cpu"), 1, words=8, rounds=1)


def test_a_cluster_that_waits_in_vain_is_stopped(shim, with_fault) -> None:
    spec = with_fault(
        cluster_hop("cluster_hop_tagged"), "cluster_hop.cu", "i < end; i += WARP", "i + 1 < end; i += WARP"
    )
    _, watch = hop(shim(spec), torch.device("cpu"), 2, words=8, rounds=2, max_turns=2**16)
    with pytest.raises(DeviceError, match=r"waited for cluster value [37]: expected 1, saw 0, gave up"):
        watch.check("cluster_hop_tagged")
