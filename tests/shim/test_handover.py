"""The benchmark of hand-overs runs to its end on the CPU, so that its GPU time is spent on measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handover import main


@pytest.mark.slow
@pytest.mark.usefixtures("host_compiler")
def test_every_kind_of_row_is_written(tmp_path: Path) -> None:
    out = tmp_path / "handover.json"
    assert main(["--shim", "--commit", "abc", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    assert {"command", "date", "device", "driver", "torch", "sm_clock_mhz", "read_gbps"} <= set(found)
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"read", "phase", "cluster", "resident"}
    for row in rows:
        if row["kind"] == "phase":
            floor_us = row["bytes_per_phase"] / rows[0]["gbps"] / 1e3
            assert row["handover_us"] == pytest.approx(row["us_per_phase"]["median"] - floor_us)
            assert row["us_per_phase"]["p10"] <= row["us_per_phase"]["median"] <= row["us_per_phase"]["p90"]
    assert {row["way"] for row in rows if row["kind"] == "cluster"} == {"tagged", "async"}
    assert all(row["cooperative"] for row in rows if row["kind"] == "resident")
