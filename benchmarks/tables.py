"""Write the tables of README.md from results/*.json, between the comments that name them.

    <!-- table cpu_decode: backend, dtype, tokens_per_s as tok/s -->
    <!-- end of table -->

names a file in results/ and, in order, keys of its rows; `as` gives a column another heading. A value that is itself a
measurement (median, p10, p90) is written as `median (p10-p90)`. `--check` writes nothing and fails if a table is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(
    r"(?P<start><!-- table (?P<name>\w+): (?P<columns>[^>]+?) -->\n).*?(?P<end><!-- end of table -->)", re.S
)


def cell(value: Any) -> str:
    """Return one value as people read it: four digits, a spread in brackets, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return f"{cell(value['median'])} ({cell(value['p10'])}–{cell(value['p90'])})"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a Markdown table of some keys of the rows; a row may lack a key, but a key that all lack is a mistake."""
    keys = [column.partition(" as ")[0].strip() for column in columns]
    headings = [column.rpartition(" as ")[2].strip() for column in columns]
    if unknown := [key for key in keys if not any(key in row for row in rows)]:
        raise SystemExit(
            f"no row has {', '.join(unknown)}; there are {', '.join(sorted({k for row in rows for k in row}))}"
        )
    numeric = [all(isinstance(row.get(key), (int, float, Mapping, type(None))) for row in rows) for key in keys]
    lines = [headings, ["---:" if right else "---" for right in numeric]]
    lines += [[cell(row.get(key)) for key in keys] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(text: str, results: Path) -> str:
    """Return the text with every table in it written anew from the results."""

    def replace(match: re.Match[str]) -> str:
        rows = json.loads((results / f"{match['name']}.json").read_text())["rows"]
        return match["start"] + table(rows, match["columns"].split(",")) + match["end"]

    return TABLE.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of README.md from results/*.json.")
    parser.add_argument("--check", action="store_true", help="only tell whether they are up to date")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = render(text, ROOT / "results")
    if options.check and fresh != text:
        print("README.md holds tables that differ from results/: run `make tables`")
        return 1
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
