"""Shared fixtures: where the demo model is. And what was skipped: a summary, and `--strict-skips` for CI."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores

# No deadline: the machines are noisy. In CI the same examples every time.
settings.register_profile("onekernel", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("onekernel")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct GGUF that `dev.py` unpacks under the virtual environment."""
    folder = Path(os.environ.get("ONEKERNEL_TEST_MODELS", Path(sys.prefix) / "models"))
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.exists(), f"{path} is missing: run `python3 dev.py install`"
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips", action="store_true", help="fail on a skip whose reason does not start with 'no GPU'"
    )


def skips(config: pytest.Config) -> Counter[str]:
    """How many tests (or files) were skipped, by reason; with xdist only the controlling process knows."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def refused_skips(config: pytest.Config) -> list[str]:
    if not config.getoption("--strict-skips"):
        return []
    return [reason for reason in skips(config) if not reason.startswith("no GPU")]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and refused_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in skips(config).items():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    for reason in refused_skips(config):
        terminalreporter.write_line(f"--strict-skips: only a missing GPU is a reason to skip, not: {reason}", red=True)
