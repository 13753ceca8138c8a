"""The rows of a result file that several runs fill: written after every measurement, so an end by force loses none.

Rows that were there stay unless they are measured anew, each with the commit that it was measured at.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from onekernel.measure.results import write_results

Row = dict[str, Any]
Job = tuple[str, Callable[[], Row]]
"""What is measured, for people, and what measures it."""


class Ledger:
    """One file and the rows of this run; `key` says which row of another run is the same measurement."""

    def __init__(self, path: Path, key: Callable[[Row], Hashable], commit: str | None = None, **about: Any) -> None:
        self._path, self._key, self._commit, self._about = path, key, commit, about
        self._before: list[Row] = []
        self._rows: list[Row] = []
        if path.exists():
            written = json.loads(path.read_text())
            then = {"commit": written["commit"]} if "commit" in written else {}
            self._before = [then | row for row in written["rows"]]

    def add(self, row: Row) -> None:
        """Keep a row and write the file."""
        self._rows.append(row)
        fresh = {self._key(row) for row in self._rows}
        kept = [row for row in self._before if self._key(row) not in fresh]
        write_results(self._path, [*kept, *self._rows], commit=self._commit, **self._about)


def run_jobs(jobs: Iterable[Job], ledger: Ledger, line: Callable[[Row], str], seconds: float) -> int:
    """Measure one after another and return 0, or 1 if any failed; none is begun after `seconds`.

    What fails is told with its traceback, and the next is begun.
    """
    begun, failed = time.monotonic(), 0
    for name, measure in jobs:
        spent = time.monotonic() - begun
        if spent > seconds:
            print(f"{spent:6.1f} s  no time for {name}", flush=True)
            continue
        try:
            row = measure()
        except (Exception, SystemExit):
            failed = 1
            print(f"{spent:6.1f} s  {name} failed:\n{traceback.format_exc()}", flush=True)
            continue
        ledger.add(row)
        print(f"{time.monotonic() - begun:6.1f} s  {line(row)}", flush=True)
    return failed


def picked(row: Row, names: Sequence[str]) -> Hashable:
    """Return some values of a row, for a ledger's key."""
    return tuple(row.get(name) for name in names)
