"""Plant the faults that tests claim to catch, one at a time in a copy of the source, and demand that each is caught.

    python -m tests.faults            all of them, and whether every complaint that needs a test has one
    python -m tests.faults F1 H3      those of some complaints

A test that guards a complaint says so: `@pytest.mark.complaint("F1", file="text/tokenizer.py", old="...", new="...")`.
`old` stands exactly once in that file of the package; with `new` in its place the test must fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "onekernel"

FEWEST_FAULTS = 20
PROCESSES = 2
TIMEOUT_S = 300

_NUMBERS = {
    "A": [5],
    "B": [5, 6],
    "C": range(1, 5),
    "D": range(1, 6),
    "E": range(1, 5),
    "F": range(1, 7),
    "G": range(1, 6),
    "H": range(1, 5),
    "I": range(1, 6),
    "J": range(1, 5),
    "K": range(1, 8),
    "L": range(1, 8),
}
REQUIRED = [f"{letter}{number}" for letter, numbers in _NUMBERS.items() for number in numbers]
"""The complaints that must have a test."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the package replaced by a wrong one, and the complaint that would then be true again."""

    complaint: str
    file: str
    old: str
    new: str


class Collector:
    """A pytest plugin that notes the marked tests; a parametrised test counts once, with all its cases."""

    def __init__(self) -> None:
        self.tests: dict[Fault, set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("complaint"):
                self.tests[Fault(*mark.args, **mark.kwargs)].add(item.nodeid.partition("[")[0])


def collect() -> tuple[dict[Fault, set[str]], list[str]]:
    """Return every fault with the names of the tests that claim to catch it, and what could not be collected."""
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["--collect-only", "-qq", str(ROOT / "tests")], plugins=[collector])
    problems = (
        [] if code == pytest.ExitCode.OK else [line for line in output.getvalue().splitlines() if "ERROR" in line]
    )
    return dict(collector.tests), problems


def plant(fault: Fault, package: Path) -> str | None:
    """Put the fault into a copy of the package; return what is wrong with the fault itself, if anything is."""
    path = package / fault.file
    if not path.is_file():
        return f"there is no {fault.file}"
    source = path.read_text()
    if (count := source.count(fault.old)) != 1:
        return f"`old` occurs {count} times"
    faulty = source.replace(fault.old, fault.new)
    if path.suffix == ".py":
        try:
            compile(faulty, fault.file, "exec")
        except SyntaxError as error:
            return f"`new` is no Python: {error.msg}"
    path.write_text(faulty)
    return None


def attempt(fault: Fault, tests: set[str]) -> str | None:
    """Run the tests against the faulty copy; return None if they catch the fault, or else what happened instead."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "onekernel"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if problem := plant(fault, copy):
            return problem
        # `pythonpath` of pyproject.toml would put the real source in front of the copy.
        options = ["-o", "pythonpath=", "-o", "addopts=--import-mode=importlib", "-q"]
        options += ["-p", "no:cacheprovider", "-p", "no:schemathesis"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", *options, *sorted(tests)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"the test ran for more than {TIMEOUT_S} s"
    closing = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    if done.returncode == pytest.ExitCode.OK:
        return f"NOT CAUGHT: {closing}"
    if done.returncode != pytest.ExitCode.TESTS_FAILED or not re.search(r"\b\d+ failed", closing):
        return f"no test failed, something else did: {closing}"
    return None


def attempt_twice(fault: Fault, tests: set[str]) -> str | None:
    """As `attempt`; what was not caught is tried once more: on a busy machine a process may not have come so far."""
    return attempt(fault, tests) and attempt(fault, tests)


def report(faults: dict[Fault, set[str]]) -> Iterator[str]:
    """Try every fault, print a line for each, and yield what is wrong."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        for fault, problem in zip(faults, pool.map(attempt_twice, faults, faults.values()), strict=True):
            change = f"{fault.old.strip()!r} -> {fault.new.strip()!r}"
            print(f"{fault.complaint:3}  {problem or 'caught'}\n     {fault.file}: {change}", flush=True)
            if problem:
                yield f"{fault.complaint} ({', '.join(sorted(faults[fault]))}): {problem}"


def main(ids: list[str]) -> int:
    """Try the faults of some complaints, or all; return 1 if one is not caught or a complaint has no test."""
    start = time.monotonic()
    known, problems = collect()
    have = {fault.complaint for fault in known}
    if unknown := [name for name in ids if name not in have]:
        print(f"no test is marked with {', '.join(unknown)}; there are {', '.join(sorted(have))}")
        return 1
    wanted = {fault: known[fault] for fault in sorted(known, key=str) if not ids or fault.complaint in ids}
    problems += report(wanted)
    if not ids:
        problems += [f"{name}: no test is marked with this complaint" for name in REQUIRED if name not in have]
        if len(known) < FEWEST_FAULTS:
            problems.append(f"there are {len(known)} faults; at least {FEWEST_FAULTS} must be tried")
    print(f"\n{len(wanted)} faults tried in {time.monotonic() - start:.0f} s, {len(problems)} problems")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
