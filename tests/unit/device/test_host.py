"""Threads and memory respect what a container allows."""

from __future__ import annotations

from pathlib import Path

from onekernel.device import host


def test_threads_are_cut_to_the_cgroup_quota(tmp_path: Path) -> None:
    available = host.default_threads(tmp_path)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert host.default_threads(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert host.default_threads(tmp_path) == available


def test_threads_of_cgroup_version_1(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert host.default_threads(tmp_path) == 1


def test_memory_is_the_smaller_of_system_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 80 kB\n")
    assert host.available_memory_bytes(tmp_path, meminfo) == 80 * 1024
    (tmp_path / "memory.max").write_text("51200\n")
    (tmp_path / "memory.current").write_text("10240\n")
    assert host.available_memory_bytes(tmp_path, meminfo) == 40960
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_memory_bytes(tmp_path, meminfo) == 80 * 1024


def test_without_proc_all_physical_memory_counts(tmp_path: Path) -> None:
    assert host.available_memory_bytes(tmp_path, tmp_path / "absent") > 1 << 20
