"""The same kernel on the CPU shim or on a GPU, by a parameter; and copies of the sources to plant faults in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from onekernel.device.kernel import Kernel
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import Build, find_host_compiler
from onekernel.device.spec import KERNELS, KernelSpec
from onekernel.errors import DeviceError

CASES = Path(__file__).parent / "kernels"


@pytest.fixture(scope="session")
def host_compiler() -> None:
    """Skip where there is no C++ compiler; in CI that is a failure."""
    try:
        find_host_compiler()
    except DeviceError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run the shim: {error}")
        pytest.skip(f"no host compiler: {error}")


@pytest.fixture
def shim(host_compiler: None) -> Callable[..., ShimKernel]:
    """Build a spec for the CPU: shim(spec, build=..., seed=...)."""

    def load(spec: KernelSpec, build: Build = Build.PLAIN, seed: int = 0, timeout_s: float = 20.0) -> ShimKernel:
        return ShimKernel(spec, build=build, seed=seed, timeout_s=timeout_s)

    return load


@dataclass(frozen=True, slots=True)
class Device:
    """Where a test runs its kernels."""

    torch: torch.device
    load: Callable[[KernelSpec], Kernel]

    def finish(self) -> None:
        """Wait for what was launched."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)


@pytest.fixture(params=["shim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """The shim, and a GPU where there is one."""
    if request.param == "shim":
        request.getfixturevalue("host_compiler")
        return Device(torch.device("cpu"), lambda spec: ShimKernel(spec, timeout_s=10.0))
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch sees no CUDA device")
    from onekernel.device.cuda_kernel import load_kernel

    return Device(torch.device("cuda", 0), load_kernel)


@pytest.fixture(scope="session")
def case_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's kernel sources with the test kernels beside them."""
    root = tmp_path_factory.mktemp("cases") / "kernels"
    shutil.copytree(KERNELS, root, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in CASES.glob("*.cu"):
        shutil.copy(path, root)
    return root


@pytest.fixture
def with_fault(tmp_path: Path) -> Callable[[KernelSpec, str, str, str], KernelSpec]:
    """Return a spec whose source has `new` in place of `old`, which stands once in the file."""

    def plant(spec: KernelSpec, file: str, old: str, new: str) -> KernelSpec:
        root = tmp_path / "faulty"
        shutil.copytree(spec.root, root, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        path = root / file
        source = path.read_text()
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file}"
        path.write_text(source.replace(old, new))
        return replace(spec, root=root)

    return plant
