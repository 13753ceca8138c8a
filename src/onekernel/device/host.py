"""Facts of the host: processors this process may use and memory it may take, container limits included."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def default_threads(cgroup: Path = _CGROUP) -> int:
    """Return how many processors this process may keep busy: the affinity mask, cut to the cgroup's CPU quota."""
    try:
        processors = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity masks
        processors = os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, min(processors, math.ceil(quota)) if quota else processors)


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return bytes this process can still allocate: the system's estimate, cut to what the cgroup leaves."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: all physical memory, for want of a better figure
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None:  # cgroup v1
        limit = _number(cgroup / "memory/memory.limit_in_bytes")
        used = _number(cgroup / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _cpu_quota(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(cgroup / "cpu/cpu.cfs_quota_us"), _number(cgroup / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word 'max'
        return None
