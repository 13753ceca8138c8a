"""Kernels are compiled once, and no start hangs or loads half a file, whatever happened to the one before."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import onekernel
from onekernel import env
from onekernel.device.cache import KernelCache
from onekernel.device.compile import Compiled, Compiler, compiler_runs
from onekernel.device.cubin import Resources
from onekernel.device.nvrtc import NvrtcCompiler
from onekernel.device.spec import KernelSpec, Source
from onekernel.errors import CompileError

CUBIN = bytes(range(256))

PROGRAM = """
import sys, time
from pathlib import Path
from onekernel.device.cache import KernelCache
from tests.unit.device.test_cache import FakeCompiler, compiled, kernel
root, mode = Path(sys.argv[1]), sys.argv[2]

def build(spec, compiler):
    print("compiling", flush=True)
    if mode == "hang":
        time.sleep(600)
    time.sleep(0.5)
    return compiled()

print("ready", flush=True)
sys.stdin.readline()
got = KernelCache(root, build).get(kernel(root.parent), FakeCompiler())
print("got", len(got.cubin), flush=True)
"""


class FakeCompiler:
    version = "fake 1.0.0"

    def options(self, spec: KernelSpec) -> tuple[str, ...]:
        return (f"--arch={spec.arch}",)

    def compile(self, source: Source, options: Sequence[str]) -> tuple[bytes | None, str]:
        raise AssertionError("the tests give the cache its own compile function")


def compiled() -> Compiled:
    return Compiled(CUBIN, "log", Resources(10, 0, 0, 16, 128), "fake 1.0.0", 0.5)


def kernel(folder: Path) -> KernelSpec:
    (folder / "k.cu").write_text("// a kernel\n")
    return KernelSpec("k.cu", "k", root=folder)


class Counting:
    """A compile function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, spec: KernelSpec, compiler: Compiler) -> Compiled:
        self.calls += 1
        return compiled()


def start(root: Path, mode: str = "build") -> subprocess.Popen[str]:
    """Start a process that waits for a line, then asks the cache for the kernel."""
    source, tests = Path(onekernel.__file__).parents[1], Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), mode],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(tests)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC comes for Linux only")
@pytest.mark.complaint("A1", file="device/cache.py", old='"key": key,', new='"key": name,')
def test_a_second_start_runs_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(int* out) { out[threadIdx.x] = 1; }\n')
    spec, compiler = KernelSpec("k.cu", "k", root=tmp_path), NvrtcCompiler()
    before = compiler_runs()
    first = KernelCache(tmp_path / "cache").get(spec, compiler)
    assert compiler_runs() == before + 1
    second = KernelCache(tmp_path / "cache").get(spec, compiler)
    assert compiler_runs() == before + 1
    assert second == first


def test_the_entry_says_what_it_is(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache", Counting())
    cache.get(kernel(tmp_path), FakeCompiler())
    [entry] = cache.entries()
    assert {path.name for path in entry.iterdir()} == {"kernel.cubin", "kernel.cu", "meta.json"}
    assert (entry / "kernel.cu").read_text() == '#include "k.cu"\n'
    meta = json.loads((entry / "meta.json").read_text())
    assert entry.name == f"k-{meta['key'][:16]}"
    assert (meta["arch"], meta["compiler"], meta["resources"]["registers"]) == ("sm_90a", "fake 1.0.0", 10)
    assert cache.size_bytes() == sum(path.stat().st_size for path in entry.iterdir()) > len(CUBIN)
    assert list((tmp_path / "cache/tmp").iterdir()) == []


@pytest.mark.complaint(
    "B5", file="device/cache.py", old="fcntl.LOCK_EX | fcntl.LOCK_NB", new="fcntl.LOCK_SH | fcntl.LOCK_NB"
)
def test_two_processes_at_once_compile_once(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache"), start(tmp_path / "cache")]
    for process in processes:
        go(process)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert all(output.endswith(f"got {len(CUBIN)}\n") for output in outputs)
    assert sum(output.count("compiling") for output in outputs) == 1
    assert len(KernelCache(tmp_path / "cache").entries()) == 1


def test_threads_compile_once(tmp_path: Path) -> None:
    counting = Counting()
    cache = KernelCache(tmp_path / "cache", counting)
    spec = kernel(tmp_path)
    threads = [threading.Thread(target=cache.get, args=(spec, FakeCompiler())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.calls == 1


@pytest.mark.complaint(
    "B1", file="device/cache.py", old="os.O_RDWR | os.O_CREAT,", new="os.O_RDWR | os.O_CREAT | os.O_EXCL,"
)
def test_a_killed_build_does_not_block_the_next_start(tmp_path: Path) -> None:
    process = start(tmp_path / "cache", "hang")
    go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    [lock] = (tmp_path / "cache/locks").iterdir()
    half_written = tmp_path / "cache/tmp" / lock.name
    half_written.mkdir(parents=True)
    (half_written / "kernel.cubin").write_bytes(CUBIN[:10])

    counting = Counting()
    began = time.monotonic()
    cache = KernelCache(tmp_path / "cache", counting)
    assert cache.get(kernel(tmp_path), FakeCompiler()) == compiled()
    assert time.monotonic() - began < 4
    assert counting.calls == 1
    assert [entry.name for entry in cache.entries()] == [lock.name], "the new build is in the cache"
    assert not half_written.exists()


def test_a_build_that_takes_long_is_announced_then_done_privately(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = start(tmp_path / "cache", "hang")
    go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    counting = Counting()
    cache = KernelCache(tmp_path / "cache", counting, message_after_s=0.1, give_up_after_s=0.4)
    try:
        with caplog.at_level(logging.WARNING):
            assert cache.get(kernel(tmp_path), FakeCompiler()) == compiled()
    finally:
        process.kill()
        process.communicate(timeout=60)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("waiting for another process to compile k-")
    assert messages[1].startswith("still locked after 0 s: compiling k-")
    assert (counting.calls, cache.entries()) == (1, [])


@pytest.mark.complaint(
    "B5", file="device/cache.py", old=' or meta["sha256"] != hashlib.sha256(cubin).hexdigest()', new=""
)
@pytest.mark.parametrize(
    "damage", ["flipped byte", "cut short", "no cubin", "meta is no JSON", "meta of another format"]
)
def test_a_damaged_entry_is_set_aside_and_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, spec = tmp_path / "cache", kernel(tmp_path)
    KernelCache(root, Counting()).get(spec, FakeCompiler())
    [entry] = KernelCache(root).entries()
    if damage == "flipped byte":
        (entry / "kernel.cubin").write_bytes(CUBIN[:100] + bytes([CUBIN[100] ^ 1]) + CUBIN[101:])
    elif damage == "cut short":
        (entry / "kernel.cubin").write_bytes(CUBIN[:-1])
    elif damage == "no cubin":
        (entry / "kernel.cubin").unlink()
    else:
        (entry / "meta.json").write_text('{"key": ' if damage == "meta is no JSON" else "[]")
    counting = Counting()
    cache = KernelCache(root, counting)
    with caplog.at_level(logging.WARNING):
        assert cache.get(spec, FakeCompiler()) == compiled()
    assert counting.calls == 1
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"the cached kernel {entry.name} is damaged"
    ]
    assert len(list((root / "corrupt").iterdir())) == 1
    assert KernelCache(root, counting).get(spec, FakeCompiler()) == compiled()
    assert counting.calls == 1


@pytest.mark.complaint("B6", file="device/cache.py", old="            self._warned = True", new="            pass")
def test_an_unusable_folder_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    counting = Counting()
    cache = KernelCache(tmp_path / "file/cache", counting)
    with caplog.at_level(logging.WARNING):
        for entry in ("k", "other", "third"):
            for _ in range(2):
                spec = KernelSpec("k.cu", entry, root=kernel(tmp_path).root)
                assert cache.get(spec, FakeCompiler()) == compiled()
    assert counting.calls == 3, "each kernel stays in memory"
    assert len(caplog.records) == 1
    assert "file/cache is not usable" in caplog.records[0].getMessage()
    assert (cache.entries(), cache.size_bytes()) == ([], 0)


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = KernelCache(tmp_path / "cache", Counting())
    with caplog.at_level(logging.WARNING):
        assert cache.get(kernel(tmp_path), FakeCompiler()) == compiled()
    assert "No space left on device" in caplog.records[0].getMessage()
    assert cache.entries() == []


def test_a_faulty_source_is_an_error_every_time(tmp_path: Path) -> None:
    def fail(spec: KernelSpec, compiler: Compiler) -> Compiled:
        raise CompileError("faulty")

    cache = KernelCache(tmp_path / "cache", fail)
    for _ in range(2):
        with pytest.raises(CompileError, match="faulty"):
            cache.get(kernel(tmp_path), FakeCompiler())
    assert KernelCache(tmp_path / "cache", Counting()).get(kernel(tmp_path), FakeCompiler()) == compiled()


def test_without_any_cache_folder_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONEKERNEL_CACHE_DIR", str(tmp_path / "file/cache"))
    monkeypatch.setattr(env.tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        folder = env.cache_dir.__wrapped__()
    assert folder.parent == tmp_path
    assert "no writable cache folder" in caplog.records[0].getMessage()
