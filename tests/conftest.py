"""Shared fixtures: where the demo model is, and the device to test on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct GGUF that `dev.py` unpacks under the virtual environment."""
    folder = Path(os.environ.get("ONEKERNEL_TEST_MODELS", Path(sys.prefix) / "models"))
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.exists(), f"{path} is missing: run `python3 dev.py install`"
    return path
