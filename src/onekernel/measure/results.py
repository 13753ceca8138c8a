"""The one format of results/*.json (see DESIGN in ARCHITECTURE.md): what ran, on what, and the measured rows."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Return median, p10 and p90 of the samples and their number."""
    if len(samples) < 2:
        return {"median": samples[0], "p10": samples[0], "p90": samples[0], "repeats": len(samples)}
    tenths = quantiles(samples, n=10, method="inclusive")
    return {"median": median(samples), "p10": tenths[0], "p90": tenths[-1], "repeats": len(samples)}


def rows_of_kinds(path: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a result file, if there is one, whose `kind` is one of these: what another run keeps."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [row for row in rows if row.get("kind") in kinds]


def git_commit() -> str:
    """Return the commit of the working tree, with '-dirty' if tracked files differ, or 'unknown' outside git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def write_results(
    path: Path, rows: Sequence[Mapping[str, Any]], *, commit: str | None = None, **facts: Any
) -> dict[str, Any]:
    """Write rows with the command, commit, date and machine to `path` and return what was written.

    facts: what else every row was measured under, such as device, driver, sm_clock_mhz, read_gbps, threads.
    """
    import torch

    document = {
        "command": " ".join(["python", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)]),
        "commit": commit or git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **facts,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document
