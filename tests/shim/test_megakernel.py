"""Whole answers of the megakernel on the shim: every architecture, plan and order of threads gives the reference's.

A build of the kernel takes the shim some seconds, so most of the shapes are in the slow tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.config import ModelConfig
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import Build
from onekernel.device.spec import KERNELS, KernelSpec
from onekernel.errors import DeviceError
from onekernel.models.model import Model, ModelWeights, Place
from onekernel.models.packed import pack
from onekernel.phases.attention.rope import rope_table
from onekernel.plan.abi import Kind
from tests.megakernels import CONTEXT, LOGITS, Case, checkpoint_of, prompt_of, published, small_plan, weights_of
from tests.unit.plan.models import CONFIGS, random_weights

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.usefixtures("host_compiler")]

SLOW = pytest.mark.slow


@cache
def oracle_weights(name: str, folder: Path) -> tuple[ModelConfig, ModelWeights]:
    checkpoint, config = checkpoint_of(name, folder / name)
    return config, weights_of(checkpoint, config)


@pytest.fixture
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Make a case of a model of tests/oracle.py or tests/unit/plan/models.py; options go to its plan."""

    def make(name: str, ctas: int = 3, **options: Any) -> Case:
        if name in CONFIGS and name != "llama":
            config, weights = CONFIGS[name], random_weights(CONFIGS[name])
        else:
            config, weights = oracle_weights(name, tmp_path_factory.getbasetemp())
        plan = small_plan(config, ctas, **options)
        return Case(config, weights, plan, pack(weights, config, plan.layout))

    return make


@pytest.mark.parametrize(
    ("name", "prompt_tokens"),
    [
        ("llama", 1),
        ("llama", 140),
        pytest.param("llama-3.1", 64, marks=SLOW),
        pytest.param("llama-linear", 2, marks=SLOW),
        ("llama-dynamic", 65),
        ("llama-bias", 63),
        ("qwen2", 130),  # oracle's: tied, with biases of q, k and v
        ("odd", 67),  # hidden 102, intermediate 61, vocabulary 203, head 20, squared ReLU
        pytest.param("qwen3", 100, marks=SLOW),
        pytest.param("llama-mha-head100", 129, marks=SLOW),
        pytest.param("smollm2", 70, marks=SLOW),
        pytest.param("mistral", 80, marks=SLOW),
        pytest.param("qwen3-head256", 90, marks=SLOW),
        pytest.param("head96", 65, marks=SLOW),
        pytest.param("head128", 70, marks=SLOW),
        pytest.param("bias", 66, marks=SLOW),  # ReLU
        pytest.param("tied", 127, marks=SLOW),  # hidden 72
    ],
)
def test_whole_answers(case: Callable[..., Case], name: str, prompt_tokens: int) -> None:
    it = case(name)
    prompts = [prompt_of(it.config, prompt_tokens)]
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, 6), 6)


@pytest.mark.parametrize("prompt_tokens", [124, pytest.param(60, marks=SLOW)])
def test_an_answer_that_passes_a_page_and_makes_a_member_more(case: Callable[..., Case], prompt_tokens: int) -> None:
    """With blocks of one page and 6 CTAs for 2 heads the cache is shared by 1, 2, then 3 members."""
    it = case("llama", 6)
    prompts = [prompt_of(it.config, prompt_tokens, seed=2)]
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, 8), 8)


@pytest.mark.parametrize("ctas", [1, pytest.param(2, marks=SLOW), 5, pytest.param(9, marks=SLOW)])
def test_any_number_of_ctas(case: Callable[..., Case], ctas: int) -> None:
    """One CTA has all heads; nine have more than there are hidden tiles for some phases."""
    it = case("llama", ctas)
    prompts = [prompt_of(it.config, 70)]
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, 4), 4)


def test_other_partitions_give_the_same_bits_on_the_same_build(case: Callable[..., Case]) -> None:
    it = case("llama", 4)
    prompts = [prompt_of(it.config, 130)]
    made = it.run(it.megakernel(ShimKernel), prompts, 4)
    for options in ({"partition": "level"}, {"order": (2, 0, 3, 1)}, {"partition": "level", "order": (3, 2, 1, 0)}):
        other = case("llama", 4, **options)
        again = other.run(other.megakernel(ShimKernel), prompts, 4)
        assert again.tokens == made.tokens
        assert torch.equal(again.logits, made.logits)


@pytest.mark.parametrize("name", ["llama-bias", "odd", pytest.param("qwen3", marks=SLOW)])
def test_tiles_of_four_rows(case: Callable[..., Case], name: str) -> None:
    it = case(name, tile_rows=4)
    prompts = [prompt_of(it.config, 70)]
    it.check(prompts, it.run(it.megakernel(ShimKernel), prompts, 4), 4)


@SLOW
@pytest.mark.parametrize("tile_rows", [8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_eight_sequences(case: Callable[..., Case], name: str, tile_rows: int) -> None:
    """Of different lengths, one of which ends early; the others do not notice."""
    it = case(name, 3, tile_rows=tile_rows, limits={"sequences": 8, "num_pages": 24})
    prompts = [prompt_of(it.config, n, seed=n) for n in (1, 2, 64, 65, 70, 100, 128, 140)]
    made = it.run(it.megakernel(ShimKernel), prompts, 4)
    it.check(prompts, made, 4)
    stop = made.tokens[3][1]
    stopped = it.run(it.megakernel(ShimKernel), prompts, 4, stop_ids=[stop])
    for before, after in zip(made.tokens, stopped.tokens, strict=True):
        end = before.index(stop) + 1 if stop in before else 4
        assert after == before[:end]


def test_every_order_of_threads_gives_the_same_bits(case: Callable[..., Case]) -> None:
    it = case("llama", 4)
    prompts = [prompt_of(it.config, 130)]
    made = [it.run(it.megakernel(lambda spec, s=seed: ShimKernel(spec, seed=s)), prompts, 3) for seed in range(3)]
    for other in made[1:]:
        assert other.tokens == made[0].tokens and torch.equal(other.logits, made[0].logits)


def test_a_stop_id_ends_the_launch(case: Callable[..., Case]) -> None:
    it = case("llama")
    prompts = [prompt_of(it.config, 70)]
    tokens = it.run(it.megakernel(ShimKernel), prompts, 6).tokens[0]
    stopping = it.megakernel(ShimKernel)
    assert it.run(stopping, prompts, 6, stop_ids=[tokens[2], 299]).tokens[0] == tokens[: tokens.index(tokens[2]) + 1]
    last = [stopping.read(i) for i in range(tokens.index(tokens[2]) + 1)]
    assert [slot.last for slot in last if slot] == [False] * (len(last) - 1) + [True]


@pytest.mark.parametrize("name", ["llama-bias", pytest.param("qwen3", marks=SLOW)])
def test_after_every_phase_the_exchange_holds_what_the_reference_computes(case: Callable[..., Case], name: str) -> None:
    """Each phase is the last one of a launch; several members share the cache, so combine has work."""
    it = case(name, 6)
    config, megakernel, prompt = it.config, it.megakernel(ShimKernel), prompt_of(it.config, 70)
    model, rope = Model(config, it.weights), rope_table(config, CONTEXT)
    it.run(megakernel, [prompt], 1, stop_after=0)
    pages = torch.randperm(megakernel.cache.num_pages, generator=torch.Generator().manual_seed(4))
    place = Place(megakernel.cache, pages[: it.plan.limits.table_pages], rope, len(prompt) - 1)
    buffers = {
        Kind.EMBED: ("x", "residual"),
        Kind.QKV: ("qkv", "qkv"),
        Kind.COMBINE: ("mixed", "mixed"),
        Kind.OUT: ("x", "residual"),
        Kind.GATE_UP: ("inner", "inner"),
        Kind.DOWN: ("x", "residual"),
    }
    acts, phases = model.start(prompt[-1:]), iter(model.phases)
    for phase in it.plan.phases:
        if phase.kind in (Kind.CHOOSE, Kind.ATTENTION):
            continue  # attention's parts are seen when they are combined
        it.run(megakernel, [prompt], 1, stop_after=phase.index)
        model.run(next(phases), acts, place)
        if phase.kind == Kind.HEAD:
            got, want = megakernel.logits[0], acts.logits
        else:
            buffer, attribute = buffers[phase.kind]
            want = getattr(acts, attribute)
            got = published(megakernel, buffer, phase.index, want.shape[1])
        error = float((got - want[0]).norm() / want.norm())
        assert error < (1e-7 if phase.kind == Kind.EMBED else LOGITS), f"{phase}: {error:.4f}"


def faulty(spec: KernelSpec, folder: Path, file: str, old: str, new: str) -> KernelSpec:
    """Return the spec over a copy of all sources, in which `new` stands where `old` stood once."""
    package = KERNELS.parent
    for part in ("kernels", "phases"):
        shutil.copytree(package / part, folder / part, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    source = (folder / file).read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file}"
    (folder / file).write_text(source.replace(old, new))
    return replace(spec, root=folder / "kernels")


FAULTS = {
    "dropped tag": (
        "phases/gate_up/kernel.cuh",
        "  m.give_word(task.out_word",
        "  if (output != 2) m.give_word(task.out_word",
    ),
    "early reuse of a stage": ("kernels/tile/ring.cuh", "&freed[i], CONSUMER_WARPS)", "&freed[i], 1)"),
    "wrong stage count": ("kernels/megakernel.cu", "done < bytes; done +=", "done + STAGE_BYTES < bytes; done +="),
    "missing wait for a stage": (
        "kernels/tile/ring.cuh",
        "return spin_mbarrier(watch, Wait::LANDED, at.stage, &landed[at.stage], at.round & 1);",
        "return watch.max_turns > 0 && at.round < 1000000;",
    ),
    "missing wait for values": (
        "kernels/tile/tagged.cuh",
        "return different == 0;",
        "return different < ~0u;",
    ),
    "missing wait for an append": (
        "kernels/megakernel.cu",
        "if (token == 0) return true;",
        "if (want > 0) return true;",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "missing wait for values" else SLOW) for name in FAULTS]
)
def test_a_planted_fault_is_caught(case: Callable[..., Case], tmp_path: Path, name: str) -> None:
    """Within a few orders the answer is another, or the kernel was stopped.

    To come too early for an append the loader must be a whole token ahead: few weights a CTA, and a ring that is large.
    To come too early for a stage a phase must have more of them than the ring.
    """
    ctas, stages = {"missing wait for an append": (9, 40), "missing wait for a stage": (1, 4)}.get(name, (4, 6))
    it = case("llama", ctas)
    prompts = [prompt_of(it.config, 70)]
    good = it.run(it.megakernel(ShimKernel, stages=stages), prompts, 3)
    for seed in range(8):
        megakernel = it.megakernel(
            lambda spec, s=seed: ShimKernel(faulty(spec, tmp_path / str(s), *FAULTS[name]), seed=s, timeout_s=10.0),
            stages=stages,
            max_turns=20 * 1024,
        )
        try:
            made = it.run(megakernel, prompts, 3)
        except DeviceError:
            return
        if made.tokens != good.tokens or not torch.equal(made.logits, good.logits):
            return
    pytest.fail(f"{name}: 8 orders gave the right answer")


def test_a_plan_that_reuses_a_buffer_too_early_is_caught(case: Callable[..., Case]) -> None:
    """The only CTA publishes what it mixed for its first head where the queries of its second one lie."""
    it = case("llama", 1)
    tasks, header = it.plan.tasks.copy(), it.plan.header.copy()
    second = int(header["qkv_word"]) + it.config.q_size // it.config.num_key_value_heads // 2
    header["mixed_word"] = second
    tasks["in_word"][tasks["kind"] == Kind.OUT] = second
    wrong = replace(it, plan=replace(it.plan, tasks=tasks, header=header))
    with pytest.raises(DeviceError, match=f"waited for value {second}: expected 2, saw 4, gave up"):
        wrong.run(wrong.megakernel(ShimKernel, max_turns=20 * 1024), [prompt_of(it.config, 70)], 1)


@SLOW
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.THREAD])
def test_sanitizers_find_nothing(case: Callable[..., Case], build: Build) -> None:
    """ThreadSanitizer gets a position that is a multiple of 8.

    Copies of the cache round up to 8 positions; what they bring of the one just being appended is not looked at.
    """
    it = case("llama", 2)
    prompts = [prompt_of(it.config, 66 if build is Build.ADDRESS else 9)]
    limit = 3 if build is Build.ADDRESS else 1
    load = lambda spec: ShimKernel(spec, build=build, timeout_s=250.0)  # noqa: E731
    it.check(prompts, it.run(it.megakernel(load), prompts, limit), limit)
