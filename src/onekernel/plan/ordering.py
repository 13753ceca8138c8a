"""The proof that tagged words suffice: each is written before it is read, once, and not again before all have read it.

A vector clock for each CTA (Fidge, Mattern, 1988) holds the last step of every CTA that certainly lies behind it: its
own, and those behind the words it took. The phases are gone through in order, which is one of the possible runs. In it,
every word taken must carry the expected phase's tag, so no run can wait for a word that never comes. And whoever writes
a word must have all its readers' steps behind it, so no run can overwrite a word too early. Nothing is assumed of how
phases depend on each other; only what tasks take and publish counts.

One token is enough: it starts with everything before it behind every CTA, because all take the token word, and the
proof ends by showing that whoever publishes that word has every step of every CTA behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from onekernel.errors import PlanError
from onekernel.phases.frame import Ints
from onekernel.plan.abi import Kind
from onekernel.plan.flow import Split, Step, splits, steps
from onekernel.plan.plan import Plan

_NEVER = -1


def check_order(plan: Plan) -> None:
    """Prove it for every split of the cache that a length can give; raises PlanError naming phase, CTA and words."""
    for split in splits(plan):
        token = [step for phase in plan.phases for step in steps(plan, phase.index, split)]
        _Token(plan, split, token).check()


class _Token:
    """One token's way through the exchange. Words that no range divides are one segment."""

    def __init__(self, plan: Plan, split: Split, token: list[Step]) -> None:
        self.plan, self.split, self.steps = plan, split, token
        ctas, last_phase = plan.limits.ctas, len(plan.phases) - 1
        self.bounds = np.unique(np.concatenate([np.concatenate((s.takes, s.gives), axis=1).ravel() for s in token]))
        segments = len(self.bounds)
        self.clock = np.full((ctas, ctas), _NEVER)
        self.version = np.full(segments, _NEVER)
        self.writer = np.full((segments, 2), _NEVER)
        """Step and CTA that wrote the segment."""
        self.readers = np.full((segments, ctas), _NEVER)
        """Each CTA's last step that took the segment's present value."""
        self.clocks: list[npt.NDArray[np.int64]] = []
        """The clocks after each step."""
        if plan.phases[-1].kind == Kind.CHOOSE:
            for _, segment in self._touched(token[-1].gives, token[-1].active):
                self.version[segment] = last_phase  # of the token before; who wrote it does not matter

    def check(self) -> None:
        for number, step in enumerate(self.steps):
            now = self.clock.copy()
            self._take(step, now)
            for cta in np.flatnonzero(step.active):
                now[cta, cta] = number
            self._note_readers(step, number)
            self._give(step, number, now)
            self.clock = now
            self.clocks.append(now)
        self._check_end()

    def _take(self, step: Step, now: Ints) -> None:
        for ctas, ranges, in_phase in _alike(step):
            segments = self._segments(ranges)
            wrong = segments[self.version[segments] != in_phase]
            if len(wrong):
                found = int(self.version[wrong[0]])
                state = "never written" if found == _NEVER else f"of {self._name(found)}"
                raise self._error(
                    step,
                    int(ctas[0]),
                    f"takes word {self.bounds[wrong[0]]}, which is {state}, not of {self._name(in_phase)}",
                )
            sources = np.unique(self.writer[segments], axis=0)
            for number, writer in sources[sources[:, 0] != _NEVER]:
                now[ctas] = np.maximum(now[ctas], self.clocks[number][writer])

    def _note_readers(self, step: Step, number: int) -> None:
        for ctas, ranges, _ in _alike(step):
            self.readers[np.ix_(self._segments(ranges), ctas)] = number

    def _give(self, step: Step, number: int, now: Ints) -> None:
        for cta, segments in self._touched(step.gives, step.active):
            twice = segments[self.version[segments] == step.out_phase]
            # The token word is the one that begins with this phase's tag, a token ago.
            if len(twice) and not (step.phase == len(self.plan.phases) - 1 and self.writer[twice[0], 0] == _NEVER):
                raise self._error(step, cta, f"writes word {self.bounds[twice[0]]}, which another task writes too")
            early = np.argwhere(self.readers[segments] > now[cta])
            if len(early):
                segment, reader = segments[early[0, 0]], int(early[0, 1])
                taken = self.steps[self.readers[segment, reader]].phase
                raise self._error(
                    step,
                    cta,
                    f"overwrites word {self.bounds[segment]}, which CTA {reader} may not have "
                    f"taken yet in {self._name(taken)}",
                )
            self.version[segments] = step.out_phase
            self.writer[segments] = number, cta
            self.readers[segments] = _NEVER

    def _check_end(self) -> None:
        last = self.steps[-1]
        chooser = int(np.flatnonzero(last.active)[0])
        behind = self.clock[chooser]
        for cta in range(self.plan.limits.ctas):
            mine = [number for number, step in enumerate(self.steps) if step.active[cta]]
            if mine[-1] > behind[cta]:
                raise self._error(
                    last,
                    chooser,
                    f"may publish the token before CTA {cta} has finished {self._name(self.steps[mine[-1]].phase)}",
                )

    def _touched(self, ranges: Ints, active: npt.NDArray[np.bool_]) -> Iterable[tuple[int, Ints]]:
        for cta in np.flatnonzero(active):
            yield int(cta), self._segments(ranges[cta])

    def _segments(self, ranges: Ints) -> Ints:
        starts, stops = np.searchsorted(self.bounds, ranges).T
        return np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])

    def _name(self, phase: int) -> str:
        if not 0 <= phase < len(self.plan.phases):
            return f"phase {phase}, which there is not"
        info = self.plan.phases[phase]
        return f"phase {phase} ({info.kind.name.lower()} of layer {info.layer})"

    def _error(self, step: Step, cta: int, what: str) -> PlanError:
        split = f"with {self.split.chunks} chunks, the last token member {self.split.owner}'s"
        return PlanError(f"{self._name(step.phase)}: CTA {cta} {what} ({split})")


def _alike(step: Step) -> Iterable[tuple[Ints, Ints, int]]:
    """Yield (CTAs, ranges, in_phase) for each set of active CTAs that take the same."""
    ctas = np.flatnonzero(step.active)
    keys = np.concatenate((step.takes[ctas].reshape(len(ctas), -1), step.in_phase[ctas, None]), axis=1)
    different, which = np.unique(keys, axis=0, return_inverse=True)
    for index, key in enumerate(different):
        yield ctas[which.ravel() == index], key[:-1].reshape(-1, 2), int(key[-1])
