"""`trace` needs the megakernel; what it prints and writes is tested with the kernel, on the shim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onekernel.cli.main import main
from onekernel.cli.trace import table
from onekernel.measure.timeline import Timeline, summarize
from onekernel.plan.abi import Kind
from onekernel.plan.plan import PhaseInfo
from tests.tiny_llama import write_tiny


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "0"], "--n-prompt is 0 and --token 8; give at least one prompt token"),
        (["-n", "-1"], "--token -1"),
        (["--until-us", "0"], "--until-us is 0.0; it must be above 0"),
        ([], "a trace is of the kernel on a GPU, and the device is cpu"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path)
    assert main(["trace", str(folder), "--load-format", "dummy", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in folder.iterdir())


def test_the_summary_says_where_the_time_of_two_phases_went() -> None:
    phases = (PhaseInfo(Kind.QKV, 0, 0), PhaseInfo(Kind.DOWN, 0, 1))
    edges = [[[0, 10], [0, 10]], [[2, 13], [4, 15]], [[7, 18], [7, 20]], [[8, 20], [8, 20]], [[9, 22], [9, 23]]]
    times = [np.array(edge, dtype=float) for edge in edges]
    waits = np.array([[1.0, 2.0], [1.0, 2.0]])
    timeline = Timeline(phases, np.array([4_000_000, 8_000_000]), *times, waits, np.zeros(0), np.zeros(0, np.int64))
    lines = table(timeline, summarize(timeline))
    assert lines[1].split() == ["qkv", "1", "4.0", "9.0", "9.00", "3.0", "1.0", "3.0", "1.0", "1.0"]
    assert lines[2].split() == ["down", "1", "8.0", "14.0", "14.00", "4.0", "2.0", "3.0", "1.0", "2.5"]
    assert lines[3].split() == ["token", "12.0", "23.0"]
