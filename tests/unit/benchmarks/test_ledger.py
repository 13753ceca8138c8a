"""What benchmarks write: every row at once, others kept, and a failure or the end of the time loses nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger import Job, Ledger, picked, run_jobs

KEY = partial(picked, names=("kind", "size"))


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def test_other_rows_stay_with_the_commit_they_were_measured_at(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    old = [{"kind": "a", "size": 1, "us": 9}, {"kind": "b", "us": 8}, {"kind": "c", "commit": "first", "us": 7}]
    out.write_text(json.dumps({"commit": "old", "rows": old}))
    ledger = Ledger(out, KEY, "new", device="GPU")
    ledger.add({"kind": "a", "size": 1, "us": 1})
    assert rows(out) == [
        {"commit": "old", "kind": "b", "us": 8},
        {"kind": "c", "commit": "first", "us": 7},
        {"kind": "a", "size": 1, "us": 1},
    ]
    document = json.loads(out.read_text())
    assert (document["commit"], document["device"]) == ("new", "GPU")


def test_a_failure_is_told_and_the_others_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"

    def fail(error: BaseException) -> dict[str, Any]:
        raise error

    jobs: list[Job] = [
        ("first", lambda: {"kind": "a"}),
        ("second", partial(fail, RuntimeError("out of memory"))),
        ("third", partial(fail, SystemExit("wrong"))),
        ("fourth", lambda: {"kind": "b", "written": len(rows(out))}),
    ]
    assert run_jobs(jobs, Ledger(out, KEY, "new"), str, 60.0) == 1
    assert rows(out) == [{"kind": "a"}, {"kind": "b", "written": 1}]
    said = capsys.readouterr().out
    assert "second failed" in said and "out of memory" in said and "third failed" in said


def test_nothing_is_begun_after_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    assert run_jobs([("late", lambda: {"kind": "a"})], Ledger(out, KEY, "new"), str, -1.0) == 0
    assert not out.exists()
    assert "no time for late" in capsys.readouterr().out
