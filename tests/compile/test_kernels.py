"""Every kernel compiles for every architecture it is meant for, with both CUDA majors, without spills or stack.

The quick ones are those for Hopper, or for all architectures of a kernel that is not for Hopper, with the newer CUDA.

Registers and code size must be those of resources.json: a growth is then a line in the review of the change that made
it. Another compiler version has rows of its own.
"""

from __future__ import annotations

import sys

import pytest
from _pytest.mark import ParameterSet

from tests.compile.resources import REFRESH, build, cases, key, read_table, row

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC comes for Linux only")


def marked_cases() -> list[ParameterSet]:
    hopper = {name for name, arch, _ in cases() if arch == "sm_90a"}
    newest = max(major for _, _, major in cases())
    return [
        pytest.param(
            name,
            arch,
            major,
            id=f"{name}-{arch}-{major}",
            marks=[] if major == newest and (arch == "sm_90a" or name not in hopper) else pytest.mark.slow,
        )
        for name, arch, major in cases()
    ]


@pytest.mark.parametrize(("name", "arch", "major"), marked_cases())
def test_a_kernel_compiles_and_costs_what_the_table_says(name: str, arch: str, major: int) -> None:
    compiled = build(name, arch, major)
    assert compiled.resources.spill_bytes == 0, compiled.log
    assert compiled.resources.stack_bytes == 0, compiled.log
    table, case = read_table(), key(name, arch, major)
    compiler = case.removeprefix(f"{name} {arch} ")
    if not any(known.endswith(f" {compiler}") for known in table):
        pytest.skip(f"no row of resources.json is of {compiler}; to add them: {REFRESH}")
    assert row(compiled) == table.get(case), f"{case} changed; if that is meant: {REFRESH}"


def test_the_table_has_no_other_rows() -> None:
    kernels = {(name, arch) for name, arch, _ in cases()}
    assert {tuple(case.split()[:2]) for case in read_table()} == kernels, f"refresh it: {REFRESH}"
