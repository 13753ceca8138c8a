"""Where the microseconds of one token went: each SM's phases, and the bytes that were on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onekernel.measure.marks import COPY_BYTES, Mark, Stream, read_stream
from onekernel.plan.abi import Kind
from onekernel.plan.plan import PhaseInfo, Plan

Floats = npt.NDArray[np.float64]

_COLUMNS = (Mark.PHASE, Mark.TAKEN, Mark.MULTIPLIED, Mark.MET, Mark.END, Mark.WEIGHTS)


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    """Times in us from the token's first mark; each array is (ctas, phases). NaN: the SM had no part in that step."""

    phases: tuple[PhaseInfo, ...]
    bytes_per_phase: npt.NDArray[np.int64]
    """Of weights, (phases,)."""
    begin: Floats
    taken: Floats
    """Inputs are in shared memory; what lies before is waiting for values."""
    multiplied: Floats
    """The first warp is done with its stages."""
    met: Floats
    """All warps are."""
    end: Floats
    """Results are published."""
    weights_wait: Floats
    """What the first warp waited for weights, keys and values."""
    in_flight_at: Floats
    """(steps,): times at which the bytes on their way change, over all SMs."""
    in_flight_bytes: npt.NDArray[np.int64]
    """(steps,): from that time on. A copy counts until its loader sees that it has landed."""
    active_neurons: tuple[float, ...] | None = None
    """How many neurons of each layer fired, a mean over the launch; None if the feed-forwards are dense."""

    @property
    def token_us(self) -> float:
        """From the first SM's start of the token to the last one's end."""
        return float(np.nanmax(self.end))

    @property
    def phase_us(self) -> Floats:
        """(phases,): from the moment when every SM was done with the phase before; they add up to the token."""
        last: Floats = np.fmax.accumulate(np.nanmax(self.end, axis=0))
        return np.diff(last, prepend=0.0)


@dataclass(frozen=True, slots=True)
class KindTimes:
    """All phases of one kind of a token, in us summed over them; the parts are means over the SMs that had a share."""

    kind: str
    phases: int
    megabytes: float
    total_us: float
    """See `Timeline.phase_us`."""
    values_us: float
    """Waiting for values of other SMs."""
    weights_us: float
    """Waiting for weights, keys and values of the cache."""
    work_us: float
    """Between: products, attention."""
    meet_us: float
    """Waiting for the SM's other warps."""
    publish_us: float
    """Sums, norms, activation, and the stores that other SMs wait for."""


def read_timeline(plan: Plan, words: npt.NDArray[np.uint64]) -> Timeline:
    """Read the streams, (ctas, 2, room), of a traced launch of `plan`. Raises DeviceError if they are not whole."""
    epoch_ns = int(words[:, :, 2].min())
    consumers = [read_stream(row[0], epoch_ns) for row in words]
    loaders = [read_stream(row[1], epoch_ns) for row in words]
    origin = min(float(stream.values_ns[stream.kinds != Mark.WEIGHTS][0]) for stream in consumers)
    columns = {mark: np.full((len(consumers), len(plan.phases)), np.nan) for mark in _COLUMNS}
    for cta, stream in enumerate(consumers):
        for mark, times in columns.items():
            # Attention has a round for each of the CTA's heads: the first to take, the last of the rest.
            chosen = stream.kinds == mark
            ids, values = stream.ids[chosen], stream.values_ns[chosen]
            if mark == Mark.TAKEN:
                ids, values = ids[::-1], values[::-1]
            times[cta, ids] = values / 1e3 if mark == Mark.WEIGHTS else (values - origin) / 1e3
    at, on_their_way = _in_flight(loaders, origin)
    return Timeline(
        phases=plan.phases,
        bytes_per_phase=plan.bytes_per_phase.sum(axis=0),
        begin=columns[Mark.PHASE],
        taken=columns[Mark.TAKEN],
        multiplied=columns[Mark.MULTIPLIED],
        met=columns[Mark.MET],
        end=columns[Mark.END],
        weights_wait=columns[Mark.WEIGHTS],
        in_flight_at=at,
        in_flight_bytes=on_their_way,
    )


def _in_flight(loaders: Sequence[Stream], origin_ns: float) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the times in us at which the bytes on their way change, and how many there are from then on."""
    times: list[Floats] = []
    changes: list[npt.NDArray[np.int64]] = []
    for stream in loaders:
        issued = stream.kinds == Mark.ISSUED
        sizes = stream.ids[issued] * COPY_BYTES
        landed = stream.times_ns(Mark.LANDED)
        if not landed.size:
            continue
        # Copies are seen to land in order; the first ones were issued before the token began.
        first = int(np.flatnonzero(stream.kinds == Mark.LANDED)[0])
        early = int(stream.ids[first]) + 1 - int(issued[:first].sum())
        times += [stream.values_ns[issued], landed[early:]]
        changes += [sizes, -sizes[: landed.size - early]]
    at, change = np.concatenate(times), np.concatenate(changes)
    order = np.argsort(at, kind="stable")
    return (at[order] - origin_ns) / 1e3, np.cumsum(change[order])


def summarize(timeline: Timeline) -> list[KindTimes]:
    """Return where the time of a token went, kind by kind in the order of a token."""
    phase_us = timeline.phase_us
    rows = []
    for kind in Kind:
        of_kind = [phase.index for phase in timeline.phases if phase.kind == kind]
        if not of_kind:
            continue

        def part(late: Floats, early: Floats, of_kind: list[int] = of_kind) -> float:
            spans = (late - early)[:, of_kind]
            shared = ~np.isnan(spans)
            counts = shared.sum(axis=0)
            return float((np.where(shared, spans, 0.0).sum(axis=0)[counts > 0] / counts[counts > 0]).sum())

        nothing = np.zeros_like(timeline.begin)
        weights = part(np.where(np.isnan(timeline.met), np.nan, timeline.weights_wait), nothing)
        rows.append(
            KindTimes(
                kind=kind.name.lower(),
                phases=len(of_kind),
                megabytes=float(timeline.bytes_per_phase[of_kind].sum()) / 1e6,
                total_us=float(phase_us[of_kind].sum()),
                values_us=part(timeline.taken, timeline.begin),
                weights_us=weights,
                work_us=max(0.0, part(timeline.multiplied, timeline.taken) - weights),
                meet_us=part(timeline.met, timeline.multiplied),
                publish_us=part(timeline.end, timeline.met),
            )
        )
    return rows
