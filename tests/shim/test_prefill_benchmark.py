"""The benchmark of prefill runs to its end on the CPU, so that its GPU time is spent on measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prefill import fit_rows, main
from onekernel.kernels.prefill.variants import VARIANTS


@pytest.mark.slow
@pytest.mark.usefixtures("host_compiler")
def test_every_kind_of_row_is_written(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    assert main(["--shim", "--commit", "abc", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    assert {"command", "date", "device", "driver", "torch", "read_gbps"} <= set(found)
    rows = found["rows"]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("machine", "product", "fit", "prefill")}
    assert sum(len(of) for of in kinds.values()) == len(rows)
    names = [variant.name for variant in VARIANTS[:2]]
    assert {(row["matrix"], row["tokens"], row["variant"]) for row in kinds["product"]} == {
        (matrix, tokens, name) for matrix in ("qkv", "out", "gate_up", "down") for tokens in (5, 17) for name in names
    }
    assert [row["variant"] for row in kinds["fit"]] == names
    assert [(row["tokens"], row["variant"]) for row in kinds["prefill"]] == [
        (tokens, way) for tokens in (5, 17) for way in ("torch", "packed", "packed, fitted")
    ]
    for row in kinds["prefill"]:
        assert row["prefill_ms"]["p10"] <= row["prefill_ms"]["median"] and row["floor_ms"] > 0
        assert row["tflops"] > 0 and row["torch_ms"] > 0 and row["ttft_ms"] is None


def test_a_fit_is_the_time_of_a_round_for_each_unit() -> None:
    def row(variant: str, us: float, rounds: float, units: int) -> dict[str, object]:
        return {"variant": variant, "us": {"median": us}, "rounds": rounds, "units": units}

    # 300 ns a unit; a product of an eighth of a round says little, since its CTAs have an SM each.
    rows = [row("a", 19.2, 2.0, 32), row("a", 9.6, 1.0, 32), row("a", 38.4, 1.0, 128), row("a", 100.0, 0.125, 32)]
    [fit] = fit_rows(rows)
    assert fit["variant"] == "a"
    assert fit["ns_per_unit"]["median"] == pytest.approx(300)
