"""Run a plan on the CPU: the CTAs in an adversarial order, whole answers, touching only what the plan names.

Which CTA goes on is drawn among those whose words are there, with a preference that changes now and then: one CTA runs
as far ahead, and another lags as far behind, as the tags allow. A plan that lets a CTA overwrite a word too early, or
waits for a word that never comes, stands still sooner or later, and the error says who waits for what.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onekernel.errors import PlanError
from onekernel.models.packed import PackedModel
from onekernel.plan.abi import TOKEN_FAILED, TOKEN_STOP, Kind
from onekernel.plan.cta import Cta
from onekernel.plan.exchange import Exchange, Wait
from onekernel.plan.machine import Machine
from onekernel.plan.plan import Plan

_NEW_ORDER = 0.1
"""Chance, at each step, that the CTAs' preference is drawn anew."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a launch made. `logits` is float32 (tokens, sequences, vocab_limit)."""

    tokens: tuple[tuple[int, ...], ...]
    """For each sequence, up to and with the token that ended it; without one whose logits were not finite."""
    finite: tuple[bool, ...]
    """For each sequence, whether all logits were finite."""
    logits: torch.Tensor


def interpret(
    plan: Plan,
    packed: PackedModel,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    first_tokens: Sequence[int],
    positions: Sequence[int],
    *,
    limit: int,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    trace: list[tuple[str, int, int, int]] | None = None,
) -> Answer:
    """Make up to `limit` tokens of each of the plan's sequences, greedily, in an order drawn from `seed`.

    pages: bf16 (layers, num_pages, kv_heads, 2, 64, head_dim) on the CPU, appended to in place, holding positions 0 to
    positions[s] - 1; page_table: (sequences, table_pages). `trace` receives every access to the exchange. Raises
    PlanError if all CTAs wait, or if one would touch what is not there.
    """
    machine = Machine(
        plan,
        packed.arena.numpy(),
        packed.constants.numpy(),
        pages.view(torch.uint16).numpy(),
        page_table.numpy().astype(np.int64),
        first_tokens,
        positions,
        limit,
        stop_ids,
        Exchange(plan.exchange_words, trace=trace),
    )
    with np.errstate(
        all="ignore"
    ):  # float32 may overflow here as it does in the kernel; choose finds what is not finite
        _run([Cta(machine, index) for index in range(plan.limits.ctas)], machine.exchange, random.Random(seed))
    words = machine.slots
    return Answer(
        tuple(tuple(word & ~TOKEN_STOP for word in of if not word & TOKEN_FAILED) for of in words),
        tuple(not any(word & TOKEN_FAILED for word in of) for of in words),
        torch.from_numpy(np.stack(machine.logits)),
    )


def _run(ctas: list[Cta], exchange: Exchange, draw: random.Random) -> None:
    lives = {cta.index: cta.run() for cta in ctas}
    waits: dict[int, Wait] = {}
    order = list(lives)

    def go_on(index: int) -> None:
        wait = next(lives[index], None)
        if wait is None:
            waits.pop(index, None)
            order.remove(index)
        else:
            waits[index] = wait

    draw.shuffle(order)
    for index in list(order):
        go_on(index)
    while waits:
        if draw.random() < _NEW_ORDER:
            draw.shuffle(order)
        ready = next((index for index in order if exchange.ready(waits[index])), None)
        if ready is None:
            raise PlanError(_standstill([ctas[index] for index in sorted(waits)], waits, exchange))
        go_on(ready)


def _standstill(ctas: list[Cta], waits: dict[int, Wait], exchange: Exchange) -> str:
    lines = []
    for cta in ctas:
        wait, task = waits[cta.index], cta.tasks[cta.phase]
        tags = exchange.tags[wait.word : wait.word + wait.words]
        word = int(np.flatnonzero(tags != wait.tag)[0])
        lines.append(
            f"CTA {cta.index} in phase {cta.phase} ({Kind(task['kind']).name.lower()} of layer {task['layer']}) of "
            f"token {cta.token} waits for tag {wait.tag} in word {wait.word + word}, which has tag {tags[word]}"
        )
    return "all CTAs wait: " + "; ".join(lines)
