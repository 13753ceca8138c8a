"""Compiled kernels on disk: each is compiled once per machine, however many processes start, die or share the folder.

<root>/<entry>-<key>/     kernel.cubin, meta.json, kernel.cu: appears whole, by one rename, and never changes
<root>/locks/             one file per key; the operating system frees a lock when its process dies
<root>/tmp/               entries being written
<root>/corrupt/           entries that did not match their checksum, kept for inspection
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path

from onekernel import env
from onekernel.device.compile import Compiled, Compiler, cache_key, choose_compiler, compile_kernel
from onekernel.device.cubin import Resources
from onekernel.device.spec import KernelSpec, render

log = logging.getLogger(__name__)


class KernelCache:
    """Get kernels from memory, from disk or from the compiler. Safe between threads and between processes."""

    def __init__(
        self,
        root: Path,
        compile: Callable[[KernelSpec, Compiler], Compiled] = compile_kernel,
        message_after_s: float = 5.0,
        give_up_after_s: float = 120.0,
    ) -> None:
        self.root = root
        self._compile = compile
        self._message_after_s = message_after_s
        self._give_up_after_s = give_up_after_s
        self._memory: dict[str, Compiled] = {}
        self._thread_lock = threading.Lock()
        self._warned = False

    def get(self, spec: KernelSpec, compiler: Compiler | None = None) -> Compiled:
        """Return the compiled kernel; raises CompileError if its source is at fault.

        A folder that cannot be written costs one warning, and the kernel stays in memory.
        """
        compiler = compiler or choose_compiler()
        key = cache_key(spec, compiler)
        with self._thread_lock:
            if key not in self._memory:
                self._memory[key] = self._load_or_build(spec, compiler, key)
            return self._memory[key]

    def holds(self, spec: KernelSpec, compiler: Compiler | None = None) -> bool:
        """Return whether `get` would not have to compile."""
        key = cache_key(spec, compiler or choose_compiler())
        return key in self._memory or _read(self.root / f"{spec.entry}-{key[:16]}", key) is not None

    def entries(self) -> list[Path]:
        """Return the folders of the complete entries on disk."""
        return sorted(path.parent for path in self.root.glob("*/meta.json"))

    def size_bytes(self) -> int:
        """Return what the entries take on disk."""
        return sum(file.stat().st_size for entry in self.entries() for file in entry.iterdir())

    def _load_or_build(self, spec: KernelSpec, compiler: Compiler, key: str) -> Compiled:
        name = f"{spec.entry}-{key[:16]}"
        if (found := _read(self.root / name, key)) is not None:
            return found
        with self._locked(name) as locked:
            if not locked:
                return self._compile(spec, compiler)
            if (found := _read(self.root / name, key)) is not None:
                return found  # another process built it while this one waited
            compiled = self._compile(spec, compiler)
            try:
                self._quarantine(name)
                self._write(name, key, spec, compiled)
            except OSError as error:
                self._warn(error)
            return compiled

    @contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Hold the lock of an entry, or yield False: the folder is not writable, or its holder takes too long."""
        path = self.root / "locks" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            self._warn(error)
            yield False
            return
        try:
            yield self._wait(descriptor, name)
        finally:
            os.close(descriptor)

    def _wait(self, descriptor: int, name: str) -> bool:
        start = time.monotonic()
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                waited_s = time.monotonic() - start
            except OSError as error:  # a file system without locks
                self._warn(error)
                return False
            if waited_s > self._give_up_after_s:
                log.warning("still locked after %.0f s: compiling %s in this process", waited_s, name)
                return False
            if waited_s > self._message_after_s and not told:
                log.warning("waiting for another process to compile %s", name)
                told = True
            time.sleep(min(0.05, self._message_after_s))

    def _write(self, name: str, key: str, spec: KernelSpec, compiled: Compiled) -> None:
        # Under the lock nobody else writes this entry: what is left under its name is from a process that was killed.
        (self.root / "tmp").mkdir(exist_ok=True)
        folder = self.root / "tmp" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        meta = {
            "key": key,
            "arch": spec.arch,
            "compiler": compiled.compiler,
            "seconds": compiled.seconds,
            "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
            "resources": asdict(compiled.resources),
            "log": compiled.log,
        }
        _write_file(folder / "kernel.cubin", compiled.cubin)
        _write_file(folder / "kernel.cu", render(spec).encode())
        _write_file(folder / "meta.json", json.dumps(meta, indent=1).encode())
        folder.rename(self.root / name)

    def _quarantine(self, name: str) -> None:
        """Move an entry that could not be read out of the way; the caller holds its lock."""
        if not (self.root / name).exists():
            return
        log.warning("the cached kernel %s is damaged: compiled it anew, moved the old files to corrupt/", name)
        (self.root / "corrupt").mkdir(exist_ok=True)
        (self.root / name).rename(self.root / "corrupt" / f"{name}-{uuid.uuid4().hex[:8]}")

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("the kernel cache %s is not usable (%s): kernels are compiled in memory", self.root, error)
            self._warned = True


@cache
def default_cache() -> KernelCache:
    """Return the cache under `env.cache_dir()`, one per process."""
    return KernelCache(env.cache_dir() / "kernels")


def _read(folder: Path, key: str) -> Compiled | None:
    """Return an entry, or None if it is missing or does not match its key, size or checksum."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        cubin = (folder / "kernel.cubin").read_bytes()
        if meta["key"] != key or meta["sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return Compiled(cubin, meta["log"], Resources(**meta["resources"]), meta["compiler"], meta["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
