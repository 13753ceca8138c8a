"""The config files this package ships: dimensions of published models, for dummy weights."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

_FOLDER = files("onekernel").joinpath("models", "configs")


def shipped_configs() -> tuple[str, ...]:
    """Return the names that `open_checkpoint(name, load_format="dummy")` takes, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))
    )


def read_shipped(name: str) -> dict[str, Any]:
    """Return a shipped config.json; `name` must be one of `shipped_configs()`."""
    config: dict[str, Any] = json.loads(_FOLDER.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return config
