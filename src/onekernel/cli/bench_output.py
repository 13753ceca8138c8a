"""Benchmark results as a Markdown table, CSV, JSON or JSON lines; JSON keys are llama-bench's where it has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import torch

from onekernel import __version__
from onekernel.cli.console import Console
from onekernel.engine.memory import format_bytes
from onekernel.measure.bandwidth import read_bandwidth
from onekernel.models.sizes import bytes_read_per_token

if TYPE_CHECKING:
    from onekernel.engine.load import Loaded
    from onekernel.measure.bench import Result


@dataclass(frozen=True, slots=True)
class Row:
    """One test's result with what it ran on."""

    version: str
    torch: str
    model_type: str
    model_size: int
    """Bytes of the weights in memory."""
    model_n_params: int
    backend: str
    device: str
    dtype: str
    n_threads: int
    test: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ts: float
    """Mean tokens per second."""
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]
    avg_ttft_ms: float | None
    """Mean time to the first token of the whole prompt; None for a test without one."""
    weights_gbps: float | None
    """GB/s of weights read; None for a test that is not decode alone."""
    us_per_token: float | None
    """Median over the repetitions of (last token - first token) / (tokens - 1); None with fewer than two tokens."""
    p50_us: float | None
    """Median time between two tokens, as the host sees them."""
    p99_us: float | None
    percent_of_read: float | None
    """The time of reading a token's weights and keys and values at `read_gbps`, in per cent of `us_per_token`. More
    than 100 where a CPU's caches hold them."""
    read_gbps: float | None
    """What a plain read reached just before; None where there is no memory left to measure."""
    mj_per_token: float | None
    """Energy of the GPU; None unless asked for."""

    @classmethod
    def of(cls, result: Result, loaded: Loaded, read_rate: float | None) -> Row:
        """Return the row of a result on a loaded model; read_rate in bytes per second."""
        work, backend, config = result.workload, loaded.engine.backend, loaded.config
        decode_only = work.n_prompt == 0
        read_bytes = bytes_read_per_token(config, loaded.dtype.itemsize, backend.device)
        us = result.us_per_token
        length = work.prompt_tokens + work.n_gen // 2  # on average, while decoding
        all_bytes = read_bytes + length * config.kv_bytes_per_token(loaded.dtype.itemsize)
        return cls(
            version=__version__,
            torch=torch.__version__,
            model_type=loaded.settings.name,
            model_size=backend.memory.weights_bytes,
            model_n_params=config.parameters,
            backend=backend.name,
            device=backend.device,
            dtype=str(loaded.dtype).removeprefix("torch."),
            n_threads=torch.get_num_threads(),
            test=work.name,
            n_prompt=work.n_prompt,
            n_gen=work.n_gen,
            n_depth=work.depth,
            test_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            avg_ts=result.mean,
            stddev_ts=result.deviation,
            samples_ns=[round(seconds * 1e9) for seconds in result.seconds],
            samples_ts=list(result.rates),
            avg_ttft_ms=None if decode_only else sum(result.ttft_ms) / len(result.ttft_ms),
            weights_gbps=result.mean * read_bytes / 1e9 if decode_only else None,
            us_per_token=us,
            p50_us=result.interval_us(50),
            p99_us=result.interval_us(99),
            percent_of_read=100 * all_bytes / read_rate * 1e6 / us if us and read_rate else None,
            read_gbps=read_rate / 1e9 if read_rate else None,
            mj_per_token=result.mj_per_token,
        )


def read_rate(device: str) -> float | None:
    """Return the bytes per second that a plain read reaches now; None if the GPU has no room left to measure."""
    try:
        return read_bandwidth(device)
    except torch.OutOfMemoryError:
        return None


class Writer(Protocol):
    """Prints rows as they come, and what follows them."""

    def row(self, row: Row) -> None:
        """Take the next row."""
        ...

    def end(self, rows: list[Row]) -> None:
        """Take the end."""
        ...


def writer(output: str, console: Console, *, energy: bool = False) -> Writer:
    """Return the writer for an --output word; the table has a column for energy only if that is measured."""
    kinds: dict[str, Callable[[Console], Writer]] = {"csv": _Csv, "json": _Json, "jsonl": _JsonLines}
    return kinds[output](console) if output in kinds else _Table(console, energy=energy)


_COLUMNS = (
    ("model", 24), ("size", 8), ("params", 8), ("backend", 10), ("device", 7), ("dtype", 8), ("threads", 7),
    ("test", 18), ("t/s", 18), ("TTFT ms", 9), ("GB/s", 7),
    ("us/token", 9), ("p50 us", 9), ("p99 us", 9), ("% of read", 9),
)  # fmt: skip
_ENERGY = (("mJ/token", 8),)


class _Table:
    """A Markdown table, padded so that it can be read as it is; the first six columns are words, the rest numbers."""

    def __init__(self, console: Console, *, energy: bool) -> None:
        self._console = console
        self._columns = (*_COLUMNS, *_ENERGY) if energy else _COLUMNS
        self._begun = False

    def row(self, row: Row) -> None:
        if not self._begun:
            self._begun = True
            self._print([name for name, _ in self._columns])
            widths = [width for _, width in self._columns]
            self._print([f"{'-' * (width - 1)}{'-' if index < 6 else ':'}" for index, width in enumerate(widths)])
        cells = [
            row.model_type,
            format_bytes(row.model_size),
            _count(row.model_n_params),
            row.backend,
            row.device,
            row.dtype,
            str(row.n_threads),
            row.test,
            f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
            *(
                "" if value is None else f"{value:.1f}"
                for value in (
                    row.avg_ttft_ms,
                    row.weights_gbps,
                    row.us_per_token,
                    row.p50_us,
                    row.p99_us,
                    row.percent_of_read,
                    row.mj_per_token,
                )
            ),
        ]
        self._print(cells[: len(self._columns)])

    def end(self, rows: list[Row]) -> None:
        pass

    def _print(self, cells: list[str]) -> None:
        padded = (
            f"{cell:<{width}}" if index < 6 else f"{cell:>{width}}"
            for index, (cell, (_, width)) in enumerate(zip(cells, self._columns, strict=True))
        )
        self._console.data(f"| {' | '.join(padded)} |")


class _Csv:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def row(self, row: Row) -> None:
        if not self._begun:
            self._begun = True
            self._print([field.name for field in fields(Row)])
        self._print([" ".join(map(str, value)) if isinstance(value, list) else value for value in asdict(row).values()])

    def end(self, rows: list[Row]) -> None:
        pass

    def _print(self, cells: list[object]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(cells)
        self._console.data(line.getvalue())


class _JsonLines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def row(self, row: Row) -> None:
        self._console.data(json.dumps(asdict(row)))

    def end(self, rows: list[Row]) -> None:
        pass


class _Json:
    def __init__(self, console: Console) -> None:
        self._console = console

    def row(self, row: Row) -> None:
        pass

    def end(self, rows: list[Row]) -> None:
        self._console.data(json.dumps([asdict(row) for row in rows], indent=1))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"
