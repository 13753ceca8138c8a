"""The README's tables say what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tables import render

ROOT = Path(__file__).resolve().parents[3]

TEXT = """# Title
<!-- table speed: backend, tokens_per_s as tok/s, us -->
old
<!-- end of table -->
rest
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        {"backend": "a|b", "tokens_per_s": {"median": 23.456, "p10": 20.0, "p90": 24.0}, "us": 1234.56},
        {"backend": "b", "tokens_per_s": {"median": 2.0, "p10": 1.0, "p90": 3.0}},
    ]
    (tmp_path / "speed.json").write_text(json.dumps({"rows": rows}))
    return tmp_path


def test_a_table_is_written_from_its_rows(results: Path) -> None:
    assert render(TEXT, results) == (
        "# Title\n"
        "<!-- table speed: backend, tokens_per_s as tok/s, us -->\n"
        "| backend | tok/s | us |\n"
        "| --- | ---: | ---: |\n"
        "| a\\|b | 23.46 (20–24) | 1235 |\n"
        "| b | 2 (1–3) | – |\n"
        "<!-- end of table -->\n"
        "rest\n"
    )


def test_writing_twice_changes_nothing(results: Path) -> None:
    once = render(TEXT, results)
    assert render(once, results) == once


def test_a_column_that_no_row_has_is_named(results: Path) -> None:
    with pytest.raises(SystemExit, match="no row has speed; there are backend, tokens_per_s, us"):
        render(TEXT.replace("us -->", "speed -->"), results)


def test_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert render(text, ROOT / "results") == text
