"""Which GPUs and drivers the kernels run on; a refusal is one sentence: what was found, is needed, is to be done."""

from __future__ import annotations

from collections.abc import Mapping

from onekernel.device.facts import DeviceFacts
from onekernel.device.toolkit import default_toolkit
from onekernel.errors import DeviceError

ARCHITECTURES = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}
"""Compute capability -> the architecture compiled for it. Code for 10.0 also runs on 10.3, and 12.0 on 12.1."""

OPERATOR_ARCHITECTURES = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", **ARCHITECTURES}
"""The same for operators whose kernels use nothing newer than sm_80."""

MINIMUM_DRIVERS = {12: ((12, 0), "525.60.13"), 13: ((13, 0), "580.65.06")}
"""CUDA major of the compiler -> the CUDA the driver must support, and the first Linux driver that does.

Cubins run under every driver of their own major or a later one; PTX would need the exact minor, so none is made.
"""

INSTEAD = "use --backend reference, which needs no kernel of this package, or --device cpu"


def architecture(facts: DeviceFacts, known: Mapping[tuple[int, int], str] = ARCHITECTURES) -> str:
    """Return the architecture to compile for; raises DeviceError for a GPU outside the list."""
    arch = known.get(facts.capability)
    if arch is None:
        supported = ", ".join(f"{major}.{minor}" for major, minor in known)
        found = f"{facts.capability[0]}.{facts.capability[1]}"
        raise _refusal(facts, f"has compute capability {found} ({facts.sm})", f"the kernels need one of {supported}")
    return arch


def check_supported(facts: DeviceFacts, compiler_major: int | None = None) -> None:
    """Raise DeviceError unless this package's kernels run there. `compiler_major` is the installed NVRTC's by default.

    A MIG slice is supported: its SM count is what the plan is made for.
    """
    architecture(facts)
    _check_driver(facts, compiler_major)
    if facts.exec_timeout:
        raise _refusal(
            facts,
            "has a display watchdog (KERNEL_EXEC_TIMEOUT)",
            "a kernel that runs for a whole answer needs a GPU without a display",
        )
    if not facts.cooperative:
        raise _refusal(facts, "does not support cooperative launches", "CTAs that wait for each other need them")


def check_operator(facts: DeviceFacts, compiler_major: int | None = None) -> None:
    """Raise DeviceError unless operators run there, whose kernels are short and whose CTAs wait for nobody."""
    architecture(facts, OPERATOR_ARCHITECTURES)
    _check_driver(facts, compiler_major)


def _check_driver(facts: DeviceFacts, compiler_major: int | None) -> None:
    if facts.prohibited:
        raise _refusal(facts, "is in compute mode 'prohibited'", "it must let a process in (nvidia-smi -c 0)")
    needed, first_driver = MINIMUM_DRIVERS[compiler_major or default_toolkit().major]
    if facts.cuda_version < needed:
        found = f"{facts.cuda_version[0]}.{facts.cuda_version[1]}"
        raise _refusal(
            facts,
            f"has driver {facts.driver_version}, which runs CUDA {found}",
            f"kernels compiled with CUDA {needed[0]} need driver {first_driver} or newer",
        )


def _refusal(facts: DeviceFacts, found: str, needed: str) -> DeviceError:
    return DeviceError(f"cuda:{facts.index} ({facts.name}) {found}; {needed}; {INSTEAD}")
