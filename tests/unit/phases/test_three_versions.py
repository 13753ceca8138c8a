"""A phase is a folder with three versions under one name: in PyTorch, as a part of a plan, and as a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

import onekernel
from onekernel.plan.abi import Kind

PHASES = Path(onekernel.__file__).parent / "phases"


def test_the_folders_are_the_kinds_of_tasks() -> None:
    folders = {path.name for path in PHASES.iterdir() if (path / "__init__.py").exists()}
    assert folders == {kind.name.lower() for kind in Kind}


@pytest.mark.parametrize("file", ["reference.py", "task.py", "kernel.cuh"])
@pytest.mark.parametrize("kind", Kind)
def test_every_phase_has_all_three(kind: Kind, file: str) -> None:
    assert (PHASES / kind.name.lower() / file).is_file()
