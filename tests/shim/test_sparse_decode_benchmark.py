"""The decode rows of the sparse benchmark: its plans are sound, and its code runs on the shim."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sparse_decode import ENDS, FEED_FORWARD, GPU, main, only
from onekernel.plan.limits import Limits
from onekernel.plan.ordering import check_order
from onekernel.plan.plan import make_plan


@pytest.mark.parametrize("active_fraction", [0.01, None])
def test_plans_of_feed_forwards_alone_are_sound(active_fraction: float | None) -> None:
    config = replace(GPU.ffn, num_hidden_layers=2)
    plan = make_plan(config, Limits(ctas=132, max_context=64, num_pages=1), active_fraction=active_fraction)
    for kinds in (ENDS, FEED_FORWARD):
        check_order(only(plan, kinds))


@pytest.mark.slow
@pytest.mark.usefixtures("host_compiler")
def test_rows_come_and_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    of_another_run = {
        "kind": "megakernel_ffn",
        "model": "Llama-3.2-1B shape",
        "pattern": "fixed",
        "nonzero_fraction": 1.0,
    }
    out.write_text(json.dumps({"rows": [{"kind": "batched"}, of_another_run]}))
    assert main(["--shim", "--commit", "abc", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    kinds = [row["kind"] for row in document["rows"]]
    assert kinds == ["batched", "megakernel_model", "megakernel_ffn", "megakernel_ffn"]
    for row in document["rows"][1:]:
        assert row["us"]["median"] > 0 and row["roofline_us"] > 0 and row["mj_per_token"] is None
        assert row["bytes_per_token"] < row["dense_bytes_per_token"] or row["nonzero_fraction"] == 1
    assert document["rows"][2]["bytes_per_token"] <= document["rows"][2]["dense_bytes_per_token"]
