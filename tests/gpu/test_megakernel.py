"""The megakernel on a real GPU: right beside the reference and float32, repeatable, and ended by all that must end it.

Every launch is bounded: a kernel that makes no token is stopped within seconds, or the process ends.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onekernel import LLM, SamplingParams
from onekernel.config import ModelConfig, Sampling
from onekernel.device.compile import compiler_runs, refuse_late_compiles
from onekernel.device.cuda_kernel import load_kernel
from onekernel.engine.backend import MemoryReport
from onekernel.engine.megakernel import Megakernel
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.megakernel_load import assemble, plan_megakernel
from onekernel.engine.paged_backend import PagedSequence
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience
from onekernel.errors import DeviceError
from onekernel.models.model import LayerWeights, Place
from onekernel.models.packed import pack
from onekernel.models.packed_weights import PackedWeights
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.plan.abi import Kind
from onekernel.plan.limits import Limits
from onekernel.plan.plan import make_plan
from onekernel.plan.validate import validate
from onekernel.weights.shipped import read_shipped
from tests.megakernels import Case, in_float32, prompt_of, published
from tests.unit.plan.models import BASE, CONFIGS, random_weights

pytestmark = pytest.mark.timeout(90)

GPU = "cuda:0"
CONTEXT = 2048
PATIENCE = Patience(token_s=5.0, stop_s=5.0)

SHAPES: dict[str, ModelConfig] = {
    "Llama-3.2-1B": replace(model_config(read_shipped("Llama-3.2-1B")), num_hidden_layers=2),
    "Qwen3-0.6B": replace(model_config(read_shipped("Qwen3-0.6B")), num_hidden_layers=2),
    "SmolLM2-135M": replace(model_config(read_shipped("SmolLM2-135M")), num_hidden_layers=4),
    "head80": replace(BASE, hidden_size=320, head_dim=80, vocab_size=1003, max_position_embeddings=CONTEXT),
    "head96": replace(
        BASE, hidden_size=384, head_dim=96, qkv_bias=True, vocab_size=1003, max_position_embeddings=CONTEXT
    ),
    "head100": replace(CONFIGS["head100"], vocab_size=1003, max_position_embeddings=CONTEXT),
    "head256": replace(CONFIGS["head256"], vocab_size=1003, max_position_embeddings=CONTEXT),
    "odd": replace(CONFIGS["odd"], max_position_embeddings=CONTEXT),
}


def case_of(config: ModelConfig, seed: int = 0, context: int = CONTEXT) -> Case:
    """The plan that the engine would make. The packed weights are the only ones: the reference unpacks them."""
    planned = plan_megakernel(config, GPU, torch.bfloat16, context, config.vocab_size)
    assert planned.plan is not None, planned.reason
    packed = pack(random_weights(config, seed, GPU), config, planned.plan.layout)
    return Case(config, PackedWeights(packed), planned.plan, packed)


def kernel_of(case: Case) -> Megakernel:
    megakernel = assemble(case.plan, case.packed, GPU, print)
    megakernel.cache.pages.fill_(float("nan"))
    return megakernel


class Counting:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.launches = kernel, 0

    @property
    def spec(self) -> Any:
        return self._kernel.spec

    def launch(self, *args: Any, **options: Any) -> None:
        self.launches += 1
        self._kernel.launch(*args, **options)


class Rig:
    """The backend over a case, with a kernel that counts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.megakernel = kernel_of(case)
        self.kernel = Counting(self.megakernel.kernel)
        self.megakernel.kernel = self.kernel
        self.backend = MegakernelBackend(self.megakernel, memory=MemoryReport(0, 0, 0), patience=PATIENCE)

    def decode(self, prompt: list[int], limit: int, **options: Any) -> list[int]:
        sequence = self.backend.open(prompt, len(prompt) + limit)
        try:
            self.backend.prefill(sequence, CancelToken(), lambda done, total: None)
            stop_ids, sampling = options.get("stop_ids", frozenset()), options.get("sampling", Sampling())
            return [t.token_id for t in self.backend.decode(sequence, sampling, limit, stop_ids, CancelToken())]
        finally:
            self.backend.release(sequence)


@pytest.fixture(scope="module")
def llama() -> Rig:
    return Rig(case_of(SHAPES["Llama-3.2-1B"]))


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_the_reference_s_and_one_launch_each(name: str) -> None:
    """A cache of NaN, prompts within a page, over several members' blocks, and over several prefill chunks."""
    rig = Rig(case_of(SHAPES[name]))
    for prompt_tokens in (1, 50, 700, 1300):
        prompt = prompt_of(rig.case.config, prompt_tokens, seed=prompt_tokens)
        before = rig.kernel.launches
        tokens = rig.decode(prompt, 48)
        assert rig.kernel.launches - before == 1
        assert len(tokens) == 48
        rig.case.reference.check_greedy(prompt, tokens)
        rig.megakernel.cache.pages.fill_(float("nan"))


def test_twenty_repeats_give_the_same_bits(llama: Rig) -> None:
    prompt = prompt_of(llama.case.config, 600)
    made = [llama.case.run(llama.megakernel, [prompt], 32) for _ in range(20)]
    llama.case.check([prompt], made[0], 32)
    for other in made[1:]:
        assert other.tokens == made[0].tokens and torch.equal(other.logits, made[0].logits)


def test_other_partitions_and_orders_give_the_same_bits_on_the_same_build(llama: Rig) -> None:
    case, kernel = llama.case, llama.megakernel
    prompts, ctas = [prompt_of(case.config, 600)], case.plan.limits.ctas
    made, runs = case.run(kernel, prompts, 24), compiler_runs()
    orders = [(), tuple(reversed(range(ctas))), tuple(random.Random(1).sample(range(ctas), ctas))]
    for partition, order in [("level", orders[0]), ("balanced", orders[1]), ("level", orders[2])]:
        plan = make_plan(case.config, case.plan.limits, partition=partition, order=order)  # type: ignore[arg-type]
        validate(plan)
        assert plan.layout == case.plan.layout and plan.tasks.tobytes() != case.plan.tasks.tobytes()
        other = Megakernel(plan, case.packed, kernel.cache, kernel.kernel, kernel.shape)
        again = replace(case, plan=plan).run(other, prompts, 24)
        assert again.tokens == made.tokens and torch.equal(again.logits, made.logits)
    assert compiler_runs() == runs


def test_an_answer_longer_than_a_launch_goes_on_in_the_next(llama: Rig) -> None:
    prompt = prompt_of(llama.case.config, 100)
    whole = llama.decode(prompt, 60)
    short = MegakernelBackend(llama.megakernel, memory=MemoryReport(0, 0, 0), launch_tokens=7, patience=PATIENCE)
    before, own, llama.backend = llama.kernel.launches, llama.backend, short
    try:
        assert llama.decode(prompt, 60) == whole
    finally:
        llama.backend = own
    assert llama.kernel.launches - before == 9


def test_while_a_launch_runs_nothing_is_allocated_freed_pinned_or_asked(
    llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these could wait for the kernel's end, which may itself wait for the host's cancel word."""

    def calls() -> dict[str, int]:
        device, host = torch.cuda.memory_stats(GPU), torch.cuda.host_memory_stats()
        segments = {name: device[f"segment.all.{name}"] for name in ("allocated", "freed")}
        return segments | {name: host.get(name, 0) for name in ("num_host_alloc", "num_host_free")}

    asked, ended = list[float](), Megakernel.ended

    def counting(self: Megakernel) -> bool:
        asked.append(time.monotonic())
        return ended(self)

    monkeypatch.setattr(Megakernel, "ended", counting)
    backend, prompt = llama.backend, prompt_of(llama.case.config, 70)
    sequence = backend.open(prompt, CONTEXT)
    backend.prefill(sequence, CancelToken(), lambda done, total: None)
    sampling = Sampling(temperature=1.0, top_k=40, seed=3, logprobs=5)
    tokens = backend.decode(sequence, sampling, 500, frozenset(), CancelToken())
    next(tokens)
    before = calls()
    for _ in range(300):
        next(tokens)
    after, looks = calls(), len(asked)
    tokens.close()
    backend.release(sequence)
    assert after == before and looks == 0


def test_long_answers_pass_pages_and_blocks(llama: Rig) -> None:
    prompt = prompt_of(llama.case.config, 200)
    tokens = llama.decode(prompt, 500)
    llama.case.reference.check_greedy(prompt, tokens)
    assert len(set(tokens)) > 32


def test_stop_ids_and_what_needs_logits(llama: Rig) -> None:
    prompt = prompt_of(llama.case.config, 90)
    tokens = llama.decode(prompt, 12)
    stop = tokens[5]
    assert llama.decode(prompt, 12, stop_ids=frozenset({stop})) == tokens[: tokens.index(stop) + 1]
    assert llama.decode(prompt, 4, sampling=Sampling(logprobs=0)) == tokens[:4]
    sampled = llama.decode(prompt, 6, sampling=Sampling(temperature=1.0, seed=3))
    assert sampled == llama.decode(prompt, 6, sampling=Sampling(temperature=1.0, seed=3))


def test_cancelling_ends_within_two_tokens(llama: Rig) -> None:
    prompt = prompt_of(llama.case.config, 70)
    for _ in range(5):
        cancel, backend = CancelToken(), llama.backend
        sequence = backend.open(prompt, CONTEXT)
        assert isinstance(sequence, PagedSequence)
        backend.prefill(sequence, cancel, lambda done, total: None)
        tokens = backend.decode(sequence, Sampling(), CONTEXT - 70, frozenset(), cancel)
        got = [next(tokens).token_id for _ in range(10)]
        visible = len(got)
        while llama.megakernel.read(visible) is not None:
            visible += 1
        tokens.close()
        made = visible
        while made < CONTEXT - 70 and llama.megakernel.read(made) is not None:
            made += 1
        assert made <= visible + 2
        assert sequence.tokens == prompt + got and sequence.length == 70 + 9
        backend.release(sequence)


def test_a_stuck_plan_is_stopped_and_the_next_launch_works(llama: Rig) -> None:
    """The context lives on. The kernel gives up by itself after some seconds, or the host tells it to."""
    prompt = prompt_of(llama.case.config, 70)
    good = llama.decode(prompt, 8)
    cut = llama.case.plan.tasks.copy()
    cut["in_phase"][:, 6] += 100
    where = llama.megakernel._tasks
    whole = where.clone()
    for token_s in (0.5, 30.0):
        where.copy_(torch.from_numpy(cut.view("uint8").reshape(-1)))
        llama.backend.patience = Patience(token_s=token_s, stop_s=5.0)
        began = time.monotonic()
        with pytest.raises(DeviceError, match="waited for value") as caught:
            llama.decode(prompt, 8)
        assert time.monotonic() - began < 10
        assert not caught.value.context_lost
        where.copy_(whole)
        llama.backend.patience = PATIENCE
        assert llama.decode(prompt, 8) == good


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_eight_sequences(name: str) -> None:
    config = replace(CONFIGS[name], max_position_embeddings=CONTEXT)
    limits = Limits(
        ctas=132, max_context=256, num_pages=32, sequences=8, consumer_warps=8, stage_bytes=8192, block_pages=1
    )
    plan = make_plan(config, limits)
    weights = random_weights(config, device=GPU)
    case = Case(config, weights, plan, pack(weights, config, plan.layout))
    prompts = [prompt_of(config, n, seed=n) for n in (1, 2, 64, 65, 70, 100, 128, 140)]
    megakernel = case.megakernel(lambda spec: load_kernel(spec, GPU))
    case.check(prompts, case.run(megakernel, prompts, 16), 16)


def test_loading_compiles_once_and_needs_no_second_copy() -> None:
    """The second start finds the kernel; nothing is compiled after the warm-up; weights are on the device once."""
    options: dict[str, Any] = {"load_format": "dummy", "device": GPU, "max_context": 512}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    with LLM("SmolLM2-135M", **options) as llm:
        first = llm.generate([5, 6, 7], params).token_ids
    runs = compiler_runs()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with LLM("SmolLM2-135M", **options) as llm, refuse_late_compiles():
        assert llm.loaded.engine.backend.name == "megakernel"
        assert llm.generate([5, 6, 7], params).token_ids == first
        sampled = replace(params, temperature=0.8, top_k=5, seed=1, logprobs=1)
        assert len(llm.generate([5, 6, 7], sampled).token_ids) == 16
        needs = llm.loaded.engine.backend.memory
    assert compiler_runs() == runs
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * needs.total_bytes + (64 << 20)


def in_bf16(config: ModelConfig, w: LayerWeights, name: str, x: dict[str, torch.Tensor], place: Place) -> torch.Tensor:
    """One phase as a bf16 PyTorch model computes it: every intermediate is rounded."""

    def norm(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled = F.rms_norm(value.float(), (value.shape[-1],), None, config.rms_norm_eps)
        return scaled.bfloat16() * weight.bfloat16()

    if name == "qkv":
        return F.linear(norm(x["embed"], w.attention_norm), w.qkv, w.qkv_bias)
    if name == "mixed":
        d, positions = config.head_dim, place.start
        q, k, v = x["qkv"].bfloat16().split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q, k, v = q.view(-1, d), k.view(-1, d), v.view(-1, d)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = norm(q, w.q_norm), norm(k, w.k_norm)
        cos, sin = place.rope[:, positions].bfloat16()

        def turn(value: torch.Tensor) -> torch.Tensor:
            a, b = value.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        keys, values = place.cache.read(0, place.page_table, positions + 1)
        keys, values = keys.clone(), values.clone()
        keys[:, -1], values[:, -1] = turn(k), v
        group = turn(q).view(1, config.num_key_value_heads, -1, d)
        return F.scaled_dot_product_attention(group, keys[None], values[None]).reshape(1, -1)
    if name == "out":
        return x["embed"].bfloat16() + F.linear(x["mixed"].bfloat16(), w.out, w.out_bias)
    if name == "inner":
        gate, up = F.linear(norm(x["out"], w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        return F.silu(gate) * up
    if name == "down":
        return x["out"].bfloat16() + F.linear(x["inner"].bfloat16(), w.down, w.down_bias)
    raise ValueError(name)


def phase_values(case: Case, megakernel: Megakernel, prompt: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What each phase of a one-layer model published, (1, values) float32, and the logits."""
    config, x = case.config, {}
    index = {phase.kind: phase.index for phase in case.plan.phases}
    hidden = config.hidden_size
    until: dict[Kind, dict[str, tuple[str, Kind, int]]] = {
        Kind.EMBED: {"embed": ("x", Kind.EMBED, hidden)},
        Kind.OUT: {
            "qkv": ("qkv", Kind.QKV, config.q_size + 2 * config.kv_size),
            "mixed": ("mixed", Kind.COMBINE, config.q_size),
            "out": ("x", Kind.OUT, hidden),
        },
        Kind.DOWN: {
            "inner": ("inner", Kind.GATE_UP, config.intermediate_size),
            "down": ("x", Kind.DOWN, hidden),
        },
    }
    for last, buffers in until.items():
        case.run(megakernel, [prompt], 1, stop_after=index[last])
        for key, (buffer, of, size) in buffers.items():
            x[key] = published(megakernel, buffer, index[of], size).to(GPU)[None]
    return x, case.run(megakernel, [prompt], 1).logits.to(GPU)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B", "SmolLM2-135M", "head80", "head256"])
def test_each_phase_is_as_close_to_float32_as_pytorch_in_bf16(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Relative L2, pooled over 8 seeds, at most 1.5 times PyTorch's; each phase is judged by the inputs it had.

    One layer, so that the residual before every phase is known: it starts as bf16.
    """
    from onekernel.phases.attention.reference import attention
    from onekernel.phases.gate_up.reference import gate_up
    from onekernel.phases.head.reference import head
    from onekernel.phases.out.reference import out
    from onekernel.phases.qkv.reference import qkv

    config = replace(SHAPES[name], num_hidden_layers=1)
    eps, context = config.rms_norm_eps, 768
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    kernel = None
    for seed in range(8):
        case = case_of(config, seed, context)
        kernel = kernel or kernel_of(case)
        megakernel = Megakernel(case.plan, case.packed, kernel.cache, kernel.kernel, kernel.shape)
        prompt = prompt_of(config, 700, seed)
        x, logits = phase_values(case, megakernel, prompt)
        layer = case.weights.layers[0]
        w, position = in_float32(layer), len(prompt) - 1
        table = torch.randperm(kernel.cache.num_pages, generator=torch.Generator().manual_seed(4))
        rope = rope_table(config, context).to(GPU)
        place, exact = Place(kernel.cache, table, rope, position), KVCache(kernel.cache.pages.float())
        residual = out(x["embed"], x["mixed"], w.out, w.out_bias)  # float32, as its owners keep it
        wanted = {
            "qkv": qkv(x["embed"], w.attention_norm, eps, w.qkv, w.qkv_bias),
            "mixed": attention(x["qkv"], w.q_norm, w.k_norm, rope, exact, 0, table, position, config),
            "out": residual,
            "inner": gate_up(x["out"], w.mlp_norm, eps, w.gate_up, w.gate_up_bias, config.hidden_act),
            "down": out(residual, x["inner"], w.down, w.down_bias),
        }
        results = {phase: (x[phase], in_bf16(config, layer, phase, x, place), want) for phase, want in wanted.items()}
        final_norm, weight = case.weights.final_norm, case.weights.head
        scaled = F.rms_norm(x["down"], (config.hidden_size,), None, eps).bfloat16() * final_norm.bfloat16()
        results["head"] = (logits, F.linear(scaled, weight), head(x["down"], final_norm, eps, weight.float()))
        for phase, (ours, theirs, want) in results.items():
            for index, part in enumerate((ours - want, theirs.float() - want, want)):
                squares[phase][index] += float(part.double().square().sum())
    ratios = {phase: math.sqrt(ours / theirs) for phase, (ours, theirs, _) in squares.items()}
    with capsys.disabled():
        for phase, (ours, theirs, size) in squares.items():
            print(
                f"\n  {name:13} {phase:6} ours {math.sqrt(ours / size):.2e}, PyTorch in bf16 "
                f"{math.sqrt(theirs / size):.2e}, ratio {ratios[phase]:.2f}",
                end="",
            )
    assert max(ratios.values()) <= 1.5, ratios


def test_end_to_end_it_is_as_close_to_float32_as_the_bf16_reference(llama: Rig) -> None:
    """The logits after all layers, pooled over 8 prompts: at most 1.5 times the reference's error."""
    case, squares = llama.case, [0.0, 0.0]
    reference = case.reference
    for seed in range(8):
        prompt = prompt_of(case.config, 40 + seed, seed)
        made = case.run(llama.megakernel, [prompt], 1)
        bf16, want = reference.logits(prompt, made.tokens[0]), reference.exact(prompt, made.tokens[0])
        squares[0] += float((made.logits - want).double().square().sum())
        squares[1] += float((bf16 - want).double().square().sum())
    assert math.sqrt(squares[0] / squares[1]) <= 1.5
