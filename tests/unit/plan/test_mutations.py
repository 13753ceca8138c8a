"""200 plans with one wrong number each: the validator refuses it, or the answer is another one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import torch

from onekernel.errors import PlanError
from onekernel.plan.abi import HEADER, TASK, Kind
from onekernel.plan.plan import PRODUCTS, Plan
from onekernel.plan.validate import validate
from tests.unit.plan.runs import Run, plan_of, prompt_of

MUTATIONS = 200
UNUSED: dict[Kind, set[str]] = {
    Kind.EMBED: {"k_units", "inputs", "norm", "bias", "stride", "member"},
    Kind.ATTENTION: {"weights", "flags", "k_units", "inputs", "norm", "bias", "stride"},
    Kind.COMBINE: {"weights", "flags", "k_units", "inputs", "norm", "bias", "stride", "member"},
    Kind.CHOOSE: {"weights", "flags", "first", "k_units", "inputs", "norm", "bias", "stride", "member"},
    **{kind: {"stride", "member"} for kind in PRODUCTS},
}
"""What the kernel does not read: `inputs` of attention follows from the head, `stride` needs two heads on a CTA."""


@dataclass(frozen=True)
class Mutation:
    name: str
    plan: Plan


def mutate(plan: Plan, draw: random.Random) -> Mutation:
    """Drop, shift or double something: one field of a task that has work, or of the header."""
    tasks, header = plan.tasks.copy(), plan.header.copy()
    if draw.random() < 0.2:
        name = draw.choice(HEADER.dtype.names or ())
        old = header[name].item()
        header[name] = changed(old, draw) if isinstance(old, int) else old * 2
        return Mutation(f"header.{name} {old} -> {header[name]}", replace(plan, header=header))
    phase = draw.choice([phase for phase in plan.phases if tasks["count"][:, phase.index].any()])
    cta = draw.choice([c for c in range(plan.limits.ctas) if tasks["count"][c, phase.index] > 0])
    name = draw.choice([name for name in TASK.dtype.names or () if name not in UNUSED[phase.kind]])
    old = int(tasks[name][cta, phase.index])
    tasks[name][cta, phase.index] = changed(old, draw)
    what = f"{phase.kind.name} of layer {phase.layer}, CTA {cta}: {name} {old} -> {tasks[name][cta, phase.index]}"
    return Mutation(what, replace(plan, tasks=tasks))


def changed(old: int, draw: random.Random) -> int:
    options = {0, 2 * old, old + 1, old - 1, old + 4, old - 4, old + 1024, old - 1024} - {old}
    return draw.choice(sorted(option for option in options if 0 <= option < 2**32))


def test_every_mutation_is_refused_or_seen() -> None:
    run = Run(plan_of("bias", 5), [prompt_of("bias", 127)])  # the answer goes from 2 chunks of the cache to 3
    validate(run.plan)
    expected = run.interpret(limit=3)
    draw, survivors, fates = random.Random(7), [], Counter[str]()
    for _ in range(MUTATIONS):
        mutation = mutate(run.plan, draw)
        try:
            validate(mutation.plan)
        except PlanError:
            fates["refused"] += 1
            continue
        try:
            answer = run.interpret(mutation.plan, limit=3)
        except PlanError:
            fates["stood still"] += 1
            continue
        same = answer.tokens == expected.tokens and torch.equal(answer.logits, expected.logits)
        fates["same answer" if same else "another answer"] += 1
        if same:
            survivors.append(mutation.name)
    assert not survivors, (survivors, fates)


def test_most_mutations_of_edges_are_seen_without_the_validator() -> None:
    """The interpreter is no echo of the validator: what a task takes, and when, matters to what it computes."""
    run = Run(plan_of("bias", 5), [prompt_of("bias", 127)])
    expected = run.interpret(limit=3)
    draw, missed = random.Random(11), []
    for _ in range(60):
        tasks = run.plan.tasks.copy()
        phase = draw.choice([phase for phase in run.plan.phases if phase.kind in PRODUCTS])
        cta = draw.choice([c for c in range(5) if tasks["count"][c, phase.index] > 0])
        name = draw.choice(["in_phase", "in_word", "out_word", "first", "count", "inputs"])
        old = int(tasks[name][cta, phase.index])
        tasks[name][cta, phase.index] = changed(old, draw)
        try:
            answer = run.interpret(replace(run.plan, tasks=tasks), limit=3)
        except PlanError:
            continue
        if torch.equal(answer.logits, expected.logits):
            missed.append((phase, cta, name, old, int(tasks[name][cta, phase.index])))
    assert len(missed) <= 6, missed
