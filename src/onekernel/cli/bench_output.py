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

    @classmethod
    def of(cls, result: Result, loaded: Loaded) -> Row:
        """Return the row of a result on a loaded model."""
        work, backend, config = result.workload, loaded.engine.backend, loaded.config
        decode_only = work.n_prompt == 0
        read_bytes = bytes_read_per_token(config, loaded.dtype.itemsize, backend.device)
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
        )


class Writer(Protocol):
    """Prints rows as they come, and what follows them."""

    def row(self, row: Row) -> None:
        """Take the next row."""
        ...

    def end(self, rows: list[Row]) -> None:
        """Take the end."""
        ...


def writer(output: str, console: Console) -> Writer:
    """Return the writer for an --output word."""
    kinds: dict[str, Callable[[Console], Writer]] = {"csv": _Csv, "json": _Json, "jsonl": _JsonLines}
    return kinds.get(output, _Table)(console)


_COLUMNS = (
    ("model", 24), ("size", 8), ("params", 8), ("backend", 10), ("device", 7), ("dtype", 8), ("threads", 7),
    ("test", 18), ("t/s", 18), ("TTFT ms", 9), ("GB/s", 7),
)  # fmt: skip


class _Table:
    """A Markdown table, padded so that it can be read as it is; the first six columns are words, the rest numbers."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def row(self, row: Row) -> None:
        if not self._begun:
            self._begun = True
            self._print([name for name, _ in _COLUMNS])
            rules = [f"{'-' * (width - 1)}{'-' if index < 6 else ':'}" for index, (_, width) in enumerate(_COLUMNS)]
            self._print(rules)
        self._print(
            [
                row.model_type,
                format_bytes(row.model_size),
                _count(row.model_n_params),
                row.backend,
                row.device,
                row.dtype,
                str(row.n_threads),
                row.test,
                f"{row.avg_ts:.2f} ± {row.stddev_ts:.2f}",
                "" if row.avg_ttft_ms is None else f"{row.avg_ttft_ms:.1f}",
                "" if row.weights_gbps is None else f"{row.weights_gbps:.1f}",
            ]
        )

    def end(self, rows: list[Row]) -> None:
        pass

    def _print(self, cells: list[str]) -> None:
        padded = (
            f"{cell:<{width}}" if index < 6 else f"{cell:>{width}}"
            for index, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
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
