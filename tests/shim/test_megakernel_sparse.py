"""Sparse feed-forwards in the megakernel on the shim: exact whatever fires, bit for bit the same whatever the order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from onekernel.cli.trace import table
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import Build
from onekernel.device.spec import KernelSpec
from onekernel.engine.running_launch import Patience
from onekernel.errors import DeviceError
from onekernel.measure.timeline import read_timeline, summarize
from onekernel.measure.trace import trace_launch
from onekernel.plan.abi import Kind
from tests.megakernels import LOGITS, put_together, small_plan
from tests.shim.test_megakernel import faulty
from tests.shim.test_trace import TracedMegakernel
from tests.sparse_models import biases_for, packed_for, prompts_of, sparse_case

pytestmark = pytest.mark.usefixtures("host_compiler")

SLOW = pytest.mark.slow
TOKENS = 4


@pytest.mark.parametrize(
    "what",
    ["none", pytest.param("hundredth", marks=SLOW), "tenth", pytest.param("half", marks=SLOW), "all", "one", "cta"],
)
def test_answers_are_the_references(what: str) -> None:
    it = sparse_case(what)
    prompts, megakernel = prompts_of(it), it.megakernel(ShimKernel)
    it.check(prompts, it.run(megakernel, prompts, TOKENS), TOKENS)
    active = megakernel.active_neurons()
    assert active is not None and len(active) == it.config.num_hidden_layers
    inner = it.config.intermediate_size
    exact = {"none": 0, "all": inner, "one": 1}
    if what in exact:
        assert active == (exact[what],) * len(active)
    elif what == "cta":
        biases = biases_for(what, it.config)
        assert active[0] == int((biases > 0).sum()) > inner // 4
    else:
        assert all(0 < count < inner for count in active)


@pytest.mark.parametrize("ctas", [1, pytest.param(2, marks=SLOW), pytest.param(5, marks=SLOW), 11])
def test_any_number_of_ctas(ctas: int) -> None:
    """Eleven CTAs have a tile of the gate each, and some of them no rows of the residual."""
    it = sparse_case("tenth", ctas=ctas)
    prompts = prompts_of(it)
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, TOKENS), TOKENS)


@SLOW
@pytest.mark.parametrize("tile_rows", [8, 4])
@pytest.mark.parametrize(("name", "what"), [("odd", "tenth"), ("odd", "all"), ("tied", "half")])
def test_odd_sizes(name: str, what: str, tile_rows: int) -> None:
    """Hidden 102 and intermediate 61 with a squared ReLU; hidden 72."""
    it = sparse_case(what, name, ctas=4, tile_rows=tile_rows)
    prompts = prompts_of(it)
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, TOKENS), TOKENS)


def test_every_order_of_threads_and_of_ctas_gives_the_same_bits() -> None:
    it = sparse_case("half", ctas=4)
    prompts = prompts_of(it)
    made = [it.run(it.megakernel(partial(ShimKernel, seed=seed)), prompts, 3) for seed in range(3)]
    for other in made[1:]:
        assert other.tokens == made[0].tokens and torch.equal(other.logits, made[0].logits)


@SLOW
@pytest.mark.parametrize("what", ["tenth", "all"])
def test_the_feed_forward_alone_is_the_dense_one(what: str) -> None:
    """After the last layer the residual is that of the dense phases, on the same weights."""
    it = sparse_case(what)
    dense_plan = small_plan(it.config, 3)
    dense = replace(it, plan=dense_plan, packed=packed_for(it, dense_plan))
    prompts, found = prompts_of(it), []
    for case, kind in ((it, Kind.GATHER), (dense, Kind.DOWN)):
        last = max(phase.index for phase in case.plan.phases if phase.kind == kind)
        megakernel = case.megakernel(ShimKernel)
        case.run(megakernel, prompts, 1, stop_after=last)
        words = megakernel.exchange[int(case.plan.header["x_word"]) :][: it.config.hidden_size // 2]
        assert (words >> 32 == last + 1).all()
        found.append((words & 0xFFFFFFFF).int().view(torch.bfloat16).float())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < LOGITS / 2


def test_a_broken_weight_is_not_skipped() -> None:
    """A gate that is not a number counts as one that fires, so the answer says that something is wrong."""
    it = sparse_case("none")
    assert isinstance(it.weights.layers[0].gate_up, torch.Tensor)
    it.weights.layers[0].gate_up[5, 3] = torch.nan
    broken = replace(it, packed=packed_for(it, it.plan))
    megakernel = broken.megakernel(ShimKernel)
    broken.run(megakernel, prompts_of(it), 1)
    slot = megakernel.read(0)
    assert slot is not None and slot.failure is not None


FAULTS = {
    "missing wait for sums": ("phases/gather/kernel.cuh", "return seen == want;", "return seen < 1000000;"),
    "a neuron left out": ("phases/gate/kernel.cuh", "return firing;", "return firing - (firing > 0);"),
    "missing meeting before down": (
        "phases/gate/kernel.cuh",
        "  barrier_sync(CONSUMER_BARRIER, CONSUMERS);\n#pragma unroll 1\n  for (u32 column",
        "#pragma unroll 1\n  for (u32 column",
    ),
}


@SLOW
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(tmp_path: Path, name: str) -> None:
    it = sparse_case("half", ctas=4)
    prompts = prompts_of(it)
    good = it.run(it.megakernel(ShimKernel), prompts, 3)
    for seed in range(8):

        def load(spec: KernelSpec, seed: int = seed) -> ShimKernel:
            return ShimKernel(faulty(spec, tmp_path / str(seed), *FAULTS[name]), seed=seed, timeout_s=10.0)

        megakernel = it.megakernel(load, max_turns=20 * 1024)
        try:
            made = it.run(megakernel, prompts, 3)
        except DeviceError:
            return
        if made.tokens != good.tokens or not torch.equal(made.logits, good.logits):
            return
    pytest.fail(f"{name}: 8 orders gave the right answer")


@SLOW
def test_a_trace_tells_what_fired_and_where_the_time_went() -> None:
    it = sparse_case("one")
    megakernel = put_together(it.plan, it.packed, ShimKernel, TracedMegakernel)
    prompts = prompts_of(it)
    words = trace_launch(megakernel, prompts[0], it.fill(megakernel, prompts), 1, Patience())
    timeline = replace(read_timeline(it.plan, words), active_neurons=megakernel.active_neurons())
    for row in summarize(timeline):
        if row.kind == "gate":
            assert row.work_us > 0 and row.publish_us > 0 and row.megabytes > 0
        if row.kind == "gather":
            assert row.values_us > 0
    assert table(timeline, summarize(timeline))[-1] == "neurons that fired, by layer: 1 1"


@SLOW
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.THREAD])
def test_sanitizers_find_nothing(build: Build) -> None:
    it = sparse_case("half", ctas=2)
    prompts = prompts_of(it, 66 if build is Build.ADDRESS else 9)
    limit = 3 if build is Build.ADDRESS else 1
    load = lambda spec: ShimKernel(spec, build=build, timeout_s=250.0)  # noqa: E731
    it.check(prompts, it.run(it.megakernel(load), prompts, limit), limit)
