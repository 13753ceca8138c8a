"""A traced kernel on the shim: the same tokens, every mark in its order, and files that tell what the marks said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onekernel.device.kernel import Kernel
from onekernel.device.shim import ShimKernel
from onekernel.engine.megakernel import Megakernel, Windows
from onekernel.engine.running_launch import Patience
from onekernel.errors import DeviceError
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.measure.marks import Mark, read_stream
from onekernel.measure.timeline import Timeline, read_timeline, summarize
from onekernel.measure.trace import trace_launch, trace_room
from onekernel.measure.trace_files import write_chrome, write_picture
from onekernel.models.packed import PackedModel, pack
from onekernel.phases.attention.cache import KVCache
from onekernel.plan.abi import Kind
from onekernel.plan.plan import Plan
from tests.megakernels import Case, prompt_of, put_together, small_plan
from tests.unit.plan.models import CONFIGS, random_weights

pytestmark = [pytest.mark.xdist_group("trace"), pytest.mark.usefixtures("host_compiler")]

TOKEN = 1
Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


class TracedMegakernel(Megakernel):
    """Built with hooks."""

    def __init__(self, plan: Plan, packed: PackedModel, cache: KVCache, kernel: Kernel, shape: MegakernelShape) -> None:
        traced = replace(shape, traced=True)
        super().__init__(plan, packed, cache, ShimKernel(traced.spec(), timeout_s=60), traced)


@pytest.fixture(scope="module")
def case() -> Case:
    config = CONFIGS["llama"]
    weights, plan = random_weights(config), small_plan(config, 3)
    return Case(config, weights, plan, pack(weights, config, plan.layout))


@pytest.fixture(scope="module")
def streams(case: Case) -> Words:
    megakernel = put_together(case.plan, case.packed, lambda spec: ShimKernel(spec), TracedMegakernel)
    prompt = prompt_of(case.config, 70)
    table = case.fill(megakernel, [prompt])
    words = trace_launch(megakernel, prompt, table, TOKEN, Patience())
    tokens = [megakernel.read(index) for index in range(TOKEN + 2)]
    case.reference.check_greedy(prompt, [slot.token_id for slot in tokens if slot])
    return words


@pytest.fixture(scope="module")
def timeline(case: Case, streams: Words) -> Timeline:
    return read_timeline(case.plan, streams)


def test_marks_of_a_phase_are_in_order(case: Case, timeline: Timeline) -> None:
    for phase in case.plan.phases:
        works = case.plan.tasks["count"][:, phase.index] > 0
        edges = [timeline.begin, timeline.taken, timeline.multiplied, timeline.met, timeline.end]
        if phase.kind in (Kind.EMBED, Kind.COMBINE, Kind.CHOOSE):
            edges = [timeline.begin, timeline.end]
        elif phase.kind == Kind.ATTENTION:
            works &= case.plan.tasks["member"][:, phase.index] < 2  # 71 tokens are two blocks
        times = np.stack([edge[works, phase.index] for edge in edges])
        assert not np.isnan(times).any(), phase
        assert (np.diff(times, axis=0) >= 0).all(), phase
    assert (np.diff(timeline.begin, axis=1) >= 0).all()
    assert timeline.phase_us.sum() == pytest.approx(timeline.token_us)


def test_what_the_loaders_issued_is_what_the_plan_says(case: Case, streams: Words) -> None:
    issued = 0
    for row in streams:
        stream = read_stream(row[1])
        issued += int(stream.ids[stream.kinds == Mark.ISSUED].sum()) * 16
        assert (stream.kinds == Mark.LANDED).sum() >= 1
    config, cached = case.config, 70 + TOKEN - 1
    kv = 2 * 2 * config.num_hidden_layers * config.kv_size * (64 + -(-(cached - 64) // 8) * 8)
    assert issued == case.plan.bytes_per_token + kv


def test_bytes_in_flight_stay_within_the_window(case: Case, timeline: Timeline) -> None:
    ctas, stage_bytes = case.plan.limits.ctas, case.plan.limits.stage_bytes
    assert timeline.in_flight_bytes.min() >= 0
    assert stage_bytes < timeline.in_flight_bytes.max() <= ctas * max(Windows().long, Windows().deep) * stage_bytes
    assert (np.diff(timeline.in_flight_at) >= 0).all()


def test_summary_adds_up_to_the_token(case: Case, timeline: Timeline) -> None:
    rows = summarize(timeline)
    assert sum(row.total_us for row in rows) == pytest.approx(timeline.token_us)
    assert sum(row.phases for row in rows) == len(case.plan.phases)
    assert sum(row.megabytes for row in rows) == pytest.approx(case.plan.bytes_per_token / 1e6)
    assert all(row.values_us >= 0 and row.work_us >= 0 and row.publish_us >= 0 for row in rows)


def test_files(case: Case, timeline: Timeline, tmp_path: Path) -> None:
    write_chrome(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == set(range(case.plan.limits.ctas))
    assert sum(event["name"].startswith("publish: down") for event in spans) == 3 * case.config.num_hidden_layers
    assert all(event["dur"] >= 0 for event in spans)
    write_picture(timeline, tmp_path / "trace.png", "a token", until_us=timeline.token_us / 2)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_a_full_or_empty_trace_is_refused(case: Case, streams: Words) -> None:
    assert streams.shape[2] == trace_room(case.plan, 70 + TOKEN + 2)
    full = streams[0, 0].copy()
    with pytest.raises(DeviceError, match="full"):
        read_stream(full[: 5 + int(full[0])])
    with pytest.raises(DeviceError, match="left early"):
        read_stream(np.zeros(20, np.uint64))


def test_an_untraced_kernel_writes_nothing(case: Case) -> None:
    megakernel = case.megakernel(lambda spec: ShimKernel(spec, timeout_s=60))
    case.run(megakernel, [prompt_of(case.config, 5)], 2)
    assert torch.count_nonzero(megakernel._untraced.words) == 0
