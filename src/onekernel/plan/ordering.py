"""The proof that tagged words suffice: each is written before it is taken, once, and not again before all have it.

A vector clock for each CTA (Fidge, Mattern, 1988) holds the last step of every CTA that certainly lies behind it: its
own, and those behind the words it took. The phases are gone through in order, which is one of the possible runs. In it,
every word taken must carry the expected phase's tag, so no run can wait for a word that never comes. And whoever writes
a word must have all its readers' steps behind it, so no run can overwrite a word too early. Nothing is assumed of how
phases depend on each other; only what tasks take and publish counts.

Attention and combine depend on the length. They and the phase after them are gone through for every split of the cache;
after that only what holds for all of them is kept: the earliest clocks, and whoever may have taken a word.

One token is enough: it starts with everything before it behind every CTA, because all take the token word, and the
proof ends by showing that whoever publishes that word has every step of every CTA behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onekernel.errors import PlanError
from onekernel.phases.frame import Ints
from onekernel.plan.abi import Kind
from onekernel.plan.flow import Split, Step, splits, steps
from onekernel.plan.plan import PhaseInfo, Plan

_NEVER = -1
_DEPENDS = -2
"""A segment's version is another one for another length."""

Steps = npt.NDArray[np.int32]
"""Numbers of steps; those of a phase are consecutive."""


def check_order(plan: Plan) -> None:
    """Prove it for every split of the cache that a length can give; raises PlanError naming phase, CTA and words."""
    _Proof(plan).run()


@dataclass(slots=True)
class _State:
    """What is known between two steps. Words that no range divides are one segment."""

    clock: Steps
    """(ctas, ctas): row c is the clock of CTA c."""
    version: Ints
    """(segments,): phase whose tag the words carry."""
    writer: Ints
    """(segments, 2): step and CTA that wrote them."""
    readers: Steps
    """(segments, ctas): the last step of each CTA that took the present version."""
    clocks: dict[int, Steps]
    """The clocks after each step whose words may yet be taken."""

    def copy(self) -> _State:
        return _State(
            self.clock.copy(), self.version.copy(), self.writer.copy(), self.readers.copy(), dict(self.clocks)
        )

    def keep_common(self, other: _State) -> None:
        np.minimum(self.clock, other.clock, out=self.clock)
        np.maximum(self.readers, other.readers, out=self.readers)
        self.version[self.version != other.version] = _DEPENDS
        self.writer[(self.writer != other.writer).any(axis=1)] = _NEVER
        for number, clock in other.clocks.items():
            self.clocks[number] = np.minimum(self.clocks.get(number, clock), clock)


class _Proof:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.splits = plan, splits(plan)
        ctas = plan.limits.ctas
        attention = [plan.tasks["count"][:, phase.index] for phase in plan.phases if phase.kind == Kind.ATTENTION]
        self.turns = max(int(np.max(attention, initial=1)), 1)
        self.last_step = np.full(ctas, _NEVER)
        ends = [
            np.concatenate((step.takes.ravel(), step.gives.ravel()))
            for phase in plan.phases
            for split in (self.splits if _depends_on_length(phase) else self.splits[:1])
            for step in steps(plan, phase.index, split)
        ]
        self.bounds = np.unique(np.concatenate(ends))
        segments = len(self.bounds)
        self.state = _State(
            np.full((ctas, ctas), _NEVER, np.int32),
            np.full(segments, _NEVER),
            np.full((segments, 2), _NEVER),
            np.full((segments, ctas), _NEVER, np.int32),
            {},
        )
        _, token = self._pairs(next(steps(plan, len(plan.phases) - 1, self.splits[0])).gives, np.arange(ctas))
        self.state.version[token] = len(plan.phases) - 1  # of the token before; who wrote it does not matter

    def run(self) -> None:
        phases = list(self.plan.phases)
        while phases:
            count = 3 if phases[0].kind == Kind.ATTENTION else 1
            now, phases = phases[:count], phases[count:]
            if count == 1:
                self._go(self.state, now, self.splits[0])
                continue
            before, self.state = self.state, self.state.copy()
            self._go(self.state, now, self.splits[0])
            for split in self.splits[1:]:
                other = before.copy()
                self._go(other, now, split)
                self.state.keep_common(other)
        self._check_end()

    def _go(self, state: _State, phases: Sequence[PhaseInfo], split: Split) -> None:
        for phase in phases:
            for turn, step in enumerate(steps(self.plan, phase.index, split)):
                self._step(state, step, phase.index * self.turns + turn, split)

    def _step(self, state: _State, step: Step, number: int, split: Split) -> None:
        now = state.clock.copy()
        active = np.flatnonzero(step.active)
        taken = [(ctas, self._segments(ranges), in_phase) for ctas, ranges, in_phase in _alike(step, active)]
        for ctas, segments, in_phase in taken:
            wrong = segments[state.version[segments] != in_phase]
            if len(wrong):
                what = f"takes word {self.bounds[wrong[0]]}, which is {self._of(int(state.version[wrong[0]]))}"
                raise self._error(step, split, ctas[0], f"{what}, and not {self._of(in_phase)}")
            sources, writers = state.writer[segments].T
            for source in set(sources.tolist()) - {_NEVER}:
                behind = state.clocks[source][writers[sources == source]].max(axis=0)
                now[ctas] = np.maximum(now[ctas], behind)
        now[active, active] = number
        for ctas, segments, _ in taken:
            state.readers[np.ix_(segments, ctas)] = number
        self._give(state, step, number, split, now)
        state.clock = state.clocks[number] = now
        self.last_step[active] = np.maximum(self.last_step[active], number)

    def _give(self, state: _State, step: Step, number: int, split: Split, now: Steps) -> None:
        active = np.flatnonzero(step.active)
        ctas, segments = self._pairs(step.gives[active], active)
        unique, times = np.unique(segments, return_counts=True)
        twice = np.concatenate((unique[times > 1], segments[state.version[segments] == step.out_phase]))
        if len(twice) and step.phase != len(self.plan.phases) - 1:  # the token word has carried this tag from the start
            cta = ctas[segments == twice[0]][-1]
            raise self._error(step, split, cta, f"writes word {self.bounds[twice[0]]}, which another task writes too")
        early = state.readers[segments] > now[ctas]
        if early.any():
            pair, reader = np.argwhere(early)[0]
            taken = self._of(int(state.readers[segments[pair], reader]) // self.turns)
            what = f"overwrites word {self.bounds[segments[pair]]}, which CTA {reader} may not have taken yet, being"
            raise self._error(step, split, ctas[pair], f"{what} {taken}")
        state.version[segments] = step.out_phase
        state.writer[segments, 0], state.writer[segments, 1] = number, ctas
        state.readers[segments] = _NEVER

    def _check_end(self) -> None:
        last = next(steps(self.plan, len(self.plan.phases) - 1, self.splits[0]))
        chooser = int(np.flatnonzero(last.active)[0])
        for cta in np.flatnonzero(self.state.clock[chooser] < self.last_step):
            what = f"may publish the token before CTA {cta} is done, {self._of(int(self.last_step[cta]) // self.turns)}"
            raise self._error(last, self.splits[0], chooser, what)

    def _segments(self, ranges: Ints) -> Ints:
        return self._pairs(ranges[None], np.zeros(1, np.int64))[1]

    def _pairs(self, ranges: Ints, ctas: Ints) -> tuple[Ints, Ints]:
        """Return CTAs (n,) and the segments (n,) of their ranges, (ctas, ranges, 2)."""
        starts, stops = np.searchsorted(self.bounds, ranges.reshape(-1, 2)).T
        lengths = stops - starts
        offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(np.repeat(ctas, ranges.shape[1]), lengths), np.repeat(starts, lengths) + offsets

    def _of(self, phase: int) -> str:
        if phase == _NEVER:
            return "never written"
        if not 0 <= phase < len(self.plan.phases):
            return "of another phase for another length" if phase == _DEPENDS else f"of phase {phase}, which is none"
        info = self.plan.phases[phase]
        return f"of phase {phase} ({info.kind.name.lower()} of layer {info.layer})"

    def _error(self, step: Step, split: Split, cta: int, what: str) -> PlanError:
        where = f"CTA {cta}, a task {self._of(step.phase)}"
        return PlanError(f"{where}, {what} (with {split.chunks} chunks, the last token member {split.owner}'s)")


def _depends_on_length(phase: PhaseInfo) -> bool:
    return phase.kind in (Kind.ATTENTION, Kind.COMBINE)


def _alike(step: Step, active: Ints) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield (CTAs, ranges, in_phase) for each set of active CTAs that take the same."""
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    keys = np.concatenate((step.takes.reshape(len(step.takes), -1), step.in_phase[:, None]), axis=1)
    for cta in active.tolist():
        same[keys[cta].tobytes()].append(cta)
    for ctas in same.values():
        yield np.array(ctas), step.takes[ctas[0]], int(step.in_phase[ctas[0]])
