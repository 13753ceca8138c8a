"""A token's timeline as files: Chrome's trace format, which Perfetto opens too, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from onekernel.errors import ConfigError
from onekernel.measure.timeline import Timeline
from onekernel.plan.abi import Kind

_PARTS = ("wait for values", "multiply", "meet", "publish")
_COLORS = {"idle": "#ffffff", "wait for values": "#d9d9d9", "meet": "#f2c14e", "publish": "#c1440e"}
_KIND_COLORS = {
    Kind.EMBED: "#6a3d9a",
    Kind.QKV: "#1f78b4",
    Kind.ATTENTION: "#33a02c",
    Kind.COMBINE: "#b2df8a",
    Kind.OUT: "#a6cee3",
    Kind.GATE_UP: "#08519c",
    Kind.DOWN: "#4292c6",
    Kind.GATE: "#08519c",
    Kind.GATHER: "#4292c6",
    Kind.HEAD: "#54278f",
    Kind.CHOOSE: "#fb9a99",
}


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write a timeline for chrome://tracing or ui.perfetto.dev: a row for each SM, and the bytes on their way."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one token"}},
        *(
            {"ph": "M", "pid": 0, "tid": cta, "name": "thread_name", "args": {"name": f"SM {cta}"}}
            for cta in range(len(timeline.begin))
        ),
    ]
    edges = np.stack([timeline.begin, timeline.taken, timeline.multiplied, timeline.met, timeline.end])
    for phase in timeline.phases:
        name = f"{phase.kind.name.lower()} {phase.layer}"
        for cta in range(len(timeline.begin)):
            times, wait = edges[:, cta, phase.index], timeline.weights_wait[cta, phase.index]
            parts = [f"{part}: {name}" for part in _PARTS]
            if np.isnan(times).any():
                times, parts = times[[0, -1]], [name]
            for part, start, end in zip(parts, times[:-1], times[1:], strict=True):
                event = {"ph": "X", "pid": 0, "tid": cta, "name": part, "ts": _us(start), "dur": _us(end - start)}
                if part.startswith("multiply"):
                    event["args"] = {"waited for weights, us": _us(wait)}
                events.append(event)
    for at, on_their_way in zip(timeline.in_flight_at, timeline.in_flight_bytes, strict=True):
        args = {"bytes": int(on_their_way)}
        events.append({"ph": "C", "pid": 0, "name": "bytes in flight", "ts": _us(at), "args": args})
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}) + "\n")


def write_picture(timeline: Timeline, path: Path, title: str, *, until_us: float | None = None) -> None:
    """Draw a timeline, or its first `until_us`, as a PNG: SMs over time, and the bytes on their way below.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    end = min(timeline.token_us, until_us or timeline.token_us)
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(16, 8), sharex=True, height_ratios=(5, 1), layout="constrained"
    )
    upper.imshow(
        _raster(timeline, end, 3000), aspect="auto", extent=(0, end, len(timeline.begin), 0), interpolation="none"
    )
    upper.set_ylabel("SM")
    upper.set_title(title)
    names = [(name, color) for name, color in _COLORS.items() if name != "idle"]
    names += [
        (f"multiply: {kind.name.lower()}", color) for kind, color in _KIND_COLORS.items() if kind in _kinds(timeline)
    ]
    upper.legend(
        handles=[Patch(facecolor=color, edgecolor="#888888", label=name) for name, color in names],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize="small",
    )
    shown = timeline.in_flight_at <= end
    lower.step(timeline.in_flight_at[shown], timeline.in_flight_bytes[shown] / 1e6, where="post", linewidth=0.6)
    lower.set_ylabel("MB in flight")
    lower.set_xlabel("us")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _kinds(timeline: Timeline) -> set[Kind]:
    return {phase.kind for phase in timeline.phases}


def _us(value: float) -> float:
    return round(float(value), 3)


def _raster(timeline: Timeline, end: float, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return (ctas, columns, 3): the colour of what each SM did at each time."""
    image = np.empty((len(timeline.begin), columns, 3), np.uint8)
    image[:] = _rgb(_COLORS["idle"])
    for phase in timeline.phases:
        edges = [timeline.begin, timeline.taken, timeline.multiplied, timeline.met, timeline.end]
        times = np.stack([edge[:, phase.index] for edge in edges], axis=1)
        colors = [_rgb(_COLORS["wait for values"]), _rgb(_KIND_COLORS[phase.kind])]
        colors += [_rgb(_COLORS["meet"]), _rgb(_COLORS["publish"])]
        for cta, row in enumerate(times):
            if np.isnan(row).any():
                row, painted = row[[0, -1]], colors[1:2] if phase.kind in (Kind.EMBED, Kind.CHOOSE) else colors[:1]
            else:
                painted = colors
            places = np.clip(np.rint(row / end * columns), 0, columns).astype(int)
            for start, stop, color in zip(places[:-1], places[1:], painted, strict=True):
                image[cta, start:stop] = color
    return image


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(color[1:]))
