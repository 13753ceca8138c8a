"""Interpreted plans answer as the reference does, in whatever order the CTAs run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onekernel.errors import PlanError
from onekernel.models.packed import pack
from onekernel.plan.abi import Kind
from onekernel.plan.flow import Split, splits, steps
from onekernel.plan.plan import Plan
from tests.unit.plan.models import CONFIGS
from tests.unit.plan.runs import Run, plan_of, prompt_of, relative

TOKENS = 6


@pytest.mark.parametrize("ctas", [2, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_answer_agrees_with_the_reference(name: str, ctas: int) -> None:
    """The prompt of 126 tokens begins a second page; the answer passes into a third, and with it into a new chunk."""
    run = Run(plan_of(name, ctas), [prompt_of(name, 126)])
    answer = run.interpret(limit=TOKENS)
    [tokens] = answer.tokens
    exact = run.reference(0, tokens, dtype=torch.float32)
    rounded = run.reference(0, tokens, dtype=torch.bfloat16)
    noise = relative(rounded, exact)
    assert relative(answer.logits[:, 0], exact) < 1.5 * noise + 2e-3
    behind = exact.max(dim=-1).values - exact[torch.arange(TOKENS), list(tokens)]
    assert (behind <= 4 * noise * exact.std()).all(), "greedy, but for logits closer than their noise"
    assert torch.equal(answer.logits[:, 0].argmax(dim=-1), torch.tensor(tokens))


def test_eight_sequences_are_eight_answers() -> None:
    name, lengths = "qwen3", [3, 64, 65, 130, 1, 20, 127, 128]
    prompts = [prompt_of(name, length, seed) for seed, length in enumerate(lengths)]
    together = Run(plan_of(name, 3, sequences=8), prompts).interpret(limit=4)
    for sequence, prompt in enumerate(prompts):
        alone = Run(plan_of(name, 3), [prompt]).interpret(limit=4)
        assert alone.tokens[0] == together.tokens[sequence]
        assert torch.equal(alone.logits[:, 0], together.logits[:, sequence])


@pytest.mark.parametrize("name", ["llama3-rope", "tied", "bias"])
def test_neither_the_order_of_the_ctas_nor_the_partition_changes_a_bit(name: str) -> None:
    run = Run(plan_of(name, 5), [prompt_of(name, 130)])
    expected = run.interpret(limit=TOKENS, seed=0)
    for seed in range(1, 5):
        assert torch.equal(run.interpret(limit=TOKENS, seed=seed).logits, expected.logits)
    for options in ({"partition": "level"}, {"order": [3, 1, 4, 0, 2]}):
        assert torch.equal(run.interpret(plan_of(name, 5, **options), limit=TOKENS).logits, expected.logits)
    packed = pack(run.weights, run.plan.config, plan_of(name, 5, tile_rows=4).layout)
    with_4 = Run(plan_of(name, 5, tile_rows=4), run.prompts, packed).interpret(limit=TOKENS)
    assert torch.equal(with_4.logits, expected.logits)


@pytest.mark.parametrize("split", [Split(1, 0), Split(2, 1), Split(2, 0)])
@pytest.mark.parametrize("name", ["llama", "head100"])
def test_the_interpreter_touches_exactly_the_words_that_the_proofs_speak_of(name: str, split: Split) -> None:
    plan = plan_of(name, 5 if name == "llama" else 2)
    if split not in splits(plan):
        split = Split(1, 0)
    length = next(n for n in (1, 65, 129) if Split(min(plan.members, -(-n // 64)), n // 64 % plan.members) == split)
    trace: list[tuple[str, int, int, int]] = []
    Run(plan, [prompt_of(name, length)]).interpret(limit=1, trace=trace)
    expected = []
    for phase in plan.phases:
        for step in steps(plan, phase.index, split):
            for cta in np.flatnonzero(step.active).tolist():
                if phase.kind != Kind.EMBED:  # the first token comes from the launch
                    expected += [("take", *word, int(step.in_phase[cta]) + 1) for word in spans(step.takes[cta])]
                expected += [("give", *word, step.out_phase + 1) for word in spans(step.gives[cta])]
    assert sorted(trace) == sorted(expected)


def spans(ranges: np.ndarray) -> list[tuple[int, int]]:
    return [(int(start), int(stop - start)) for start, stop in ranges if stop > start]


def test_a_stop_id_ends_one_sequence_and_the_last_one_ends_the_launch() -> None:
    prompts = [prompt_of("llama", 5 + seed, seed) for seed in range(8)]
    run = Run(plan_of("llama", 2, sequences=8), prompts)
    free = run.interpret(limit=8)
    stop = free.tokens[0][2]
    stopped = run.interpret(limit=8, stop_ids=frozenset({stop}))
    for without, with_stop in zip(free.tokens, stopped.tokens, strict=True):
        end = without.index(stop) + 1 if stop in without else 8
        assert with_stop == without[:end]
    everything = frozenset(range(run.plan.config.vocab_size))
    assert len(run.interpret(limit=8, stop_ids=everything).logits) == 1


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    free = Run(plan_of("llama", 3), [prompt_of("llama", 9)])
    likeliest = free.interpret(limit=1).tokens[0][0]
    answer = free.interpret(plan_of("llama", 3, vocab_limit=likeliest), limit=5)
    assert max(answer.tokens[0]) < likeliest and answer.logits.shape[-1] == likeliest


def test_logits_that_are_not_finite_end_the_answer_without_a_token() -> None:
    run = Run(plan_of("llama", 3), [prompt_of("llama", 9)])
    offset = run.packed.layout.constants.final_norm
    run.packed.constants[offset] = float("nan")
    answer = run.interpret(limit=5)
    assert answer.tokens == ((),) and answer.finite == (False,)


def test_a_standstill_says_who_waits_for_what() -> None:
    run = Run(plan_of("llama", 2), [prompt_of("llama", 9)])
    tasks = run.plan.tasks.copy()
    [out] = [phase.index for phase in run.plan.phases if phase.kind == Kind.OUT and phase.layer == 1]
    tasks["in_phase"][0, out] += 1
    message = rf"all CTAs wait: CTA 0 in phase {out} \(out of layer 1\) of token 0 waits for tag {out + 1} in word"
    with pytest.raises(PlanError, match=message):
        run.interpret(replace(run.plan, tasks=tasks), limit=2)


def early_reuse(plan: Plan) -> Plan:
    """X of the second half of a layer goes where the first half's is, without waiting for all who take that."""
    tasks = plan.tasks.copy()
    for phase in plan.phases:
        if phase.kind == Kind.DOWN:
            tasks["inputs"][:, phase.index] = 4
    return replace(plan, tasks=tasks)


def test_a_buffer_reused_too_early_shows_in_some_order() -> None:
    run = Run(plan_of("llama", 5), [prompt_of("llama", 9)])
    with pytest.raises(PlanError, match="all CTAs wait"):
        for seed in range(20):
            run.interpret(early_reuse(run.plan), limit=3, seed=seed)
