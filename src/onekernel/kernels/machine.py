"""The specs of the kernels that only measure the machine: read_all.cu and cluster_hop.cu."""

from __future__ import annotations

from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.device.watch import PARAMS as WATCH_PARAMS

READ_THREADS = 512
HOP_THREADS = 256

READ_ALL = KernelSpec(
    file="read_all.cu",
    entry="read_all",
    constants={"READ_THREADS": READ_THREADS, "READ_LOADS": 8},
    params=(
        Pointer("data", "int32", ("vectors", 4)),
        Scalar("vectors", "u64"),
        Pointer("sums", "int32", ("threads",)),
        Pointer("times", "int64", ("ctas", 2)),
    ),
)


def cluster_hop(entry: str) -> KernelSpec:
    """Return the spec of "cluster_hop_tagged" or "cluster_hop_async"."""
    return KernelSpec(
        file="cluster_hop.cu",
        entry=entry,
        constants={"HOP_THREADS": HOP_THREADS},
        params=(
            Scalar("words", "u32"),
            Scalar("rounds", "u32"),
            Pointer("sums", "int32", ("threads",)),
            *WATCH_PARAMS,
        ),
    )


def hop_shared_bytes(words: int) -> int:
    """Return the dynamic shared memory of a CTA of either entry: two mbarriers and two boxes."""
    return 16 + 2 * words * 8
