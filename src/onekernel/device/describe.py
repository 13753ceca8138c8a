"""What `onekernel env` prints: versions, compiler, kernel cache and every fact of every GPU. It never fails."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from platform import platform, python_version

from onekernel import __version__
from onekernel.device.cache import KernelCache, default_cache
from onekernel.device.compile import choose_compiler
from onekernel.device.driver import check, driver
from onekernel.device.facts import DeviceFacts, facts
from onekernel.device.support import MINIMUM_DRIVERS, check_supported
from onekernel.device.toolkit import default_toolkit
from onekernel.errors import OnekernelError

_PACKAGES = ("torch", "cuda-bindings", "tokenizers", "safetensors", "huggingface-hub")


def describe(cache: KernelCache | None = None) -> list[tuple[str, str]]:
    """Return (name, value) rows for the user, in order; what is missing says so in its value."""
    rows = [("onekernel", __version__), ("python", f"{python_version()} on {platform()}")]
    rows += [(name, _package(name)) for name in _PACKAGES]
    rows += [("compiler", _compiler()), ("minimum driver", _minimum_driver())]
    rows += _cache_rows(cache or default_cache())
    return rows + _gpu_rows()


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    try:
        return choose_compiler().version
    except OnekernelError as error:
        return str(error)


def _minimum_driver() -> str:
    try:
        (major, minor), first = MINIMUM_DRIVERS[default_toolkit().major]
        return f"{first} (CUDA {major}.{minor})"
    except OnekernelError:
        return "unknown without a compiler"


def _cache_rows(cache: KernelCache) -> list[tuple[str, str]]:
    return [
        ("kernel cache", str(cache.root)),
        ("kernel cache holds", f"{len(cache.entries())} kernels, {cache.size_bytes() / 2**20:.1f} MiB"),
    ]


def _gpu_rows() -> list[tuple[str, str]]:
    try:
        cuda = driver()
        count = int(check(cuda.cuDeviceGetCount(), "counting GPUs", cuda))
        found = [facts(f"cuda:{index}", cuda) for index in range(count)]
    except OnekernelError as error:
        return [("GPU", str(error))]
    return [row for gpu in found for row in gpu_rows(gpu)]


def gpu_rows(found: DeviceFacts) -> list[tuple[str, str]]:
    """Return the rows of one GPU."""
    cuda = f"cuda:{found.index}"
    return [
        (cuda, f"{found.name}, {found.uuid}"),
        (f"{cuda} compute capability", f"{found.capability[0]}.{found.capability[1]} ({found.sm})"),
        (f"{cuda} SMs", f"{found.sm_count}{' (a MIG slice)' if found.mig else ''}"),
        (f"{cuda} memory", f"{found.memory_bytes / 2**30:.1f} GiB, L2 {found.l2_bytes / 2**20:.0f} MiB"),
        (
            f"{cuda} shared memory",
            f"{found.shared_bytes_per_block} bytes per CTA, {found.shared_bytes_per_sm} bytes per SM",
        ),
        (f"{cuda} driver", f"{found.driver_version}, CUDA {found.cuda_version[0]}.{found.cuda_version[1]}"),
        (
            f"{cuda} launches",
            f"cooperative {_yes(found.cooperative)}, clusters {_yes(found.clusters)}, "
            f"watchdog (KERNEL_EXEC_TIMEOUT) {_yes(found.exec_timeout)}",
        ),
        (f"{cuda} kernels", _verdict(found)),
    ]


def _verdict(found: DeviceFacts) -> str:
    try:
        check_supported(found)
    except OnekernelError as error:
        return f"not supported: {error}"
    return "supported"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
