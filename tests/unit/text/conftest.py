"""Tokenizers of the families, loaded once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from onekernel.text.tokenizer import Tokenizer
from tests.unit.text.families import FAMILIES

Load = Callable[..., Tokenizer]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return load(family, template=None) -> Tokenizer."""

    @cache
    def load(family: str, template: str | None = None) -> Tokenizer:
        path: Path = FAMILIES[family].write(tmp_path_factory.mktemp(family), template)
        return Tokenizer.from_directory(path, {}, {})

    return load
