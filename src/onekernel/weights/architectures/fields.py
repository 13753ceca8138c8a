"""Typed reading of config.json's fields; an error names the field, what was found and what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onekernel.errors import ModelError


@dataclass(frozen=True, slots=True)
class Fields:
    """A config.json, or an object inside it. A field that is null counts as absent, as in transformers."""

    values: Mapping[str, Any]
    where: str = "config.json"

    def whole(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """Return a whole number of at least `low`; without a default the field is required."""
        found = self.values.get(name)
        if found is None:
            found = self._required(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < low:
            raise self._wrong(name, found, f"a whole number of at least {low}")
        return found

    def whole_or_none(self, name: str, *, low: int = 1) -> int | None:
        """Return a whole number of at least `low`, or None if the field is absent."""
        return None if self.values.get(name) is None else self.whole(name, low=low)

    def real(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0; without a default the field is required."""
        found = self.values.get(name)
        if found is None:
            found = self._required(name, default)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not (0 < found < math.inf):
            raise self._wrong(name, found, "a finite number above 0")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self._wrong(name, found, "true or false")
        return found

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        found = self.values.get(name)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self._wrong(name, found, "a string")
        return found

    def names(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None if it is absent."""
        found = self.values.get(name)
        if found is None:
            return None
        if not isinstance(found, (list, tuple)) or not all(isinstance(item, str) for item in found):
            raise self._wrong(name, found, "a list of strings")
        return tuple(found)

    def inner(self, name: str) -> Fields | None:
        """Return the object under `name`, or None if it is absent or empty."""
        found = self.values.get(name)
        if found is None or found == {}:
            return None
        if not isinstance(found, Mapping):
            raise self._wrong(name, found, "an object")
        return Fields(found, f"{self.where}'s {name}")

    def _required(self, name: str, default: float | None) -> float:
        if default is None:
            raise ModelError(f"{self.where} has no {name}; the file is not complete: fetch the model again")
        return default

    def _wrong(self, name: str, found: object, must_be: str) -> ModelError:
        return ModelError(f"{self.where}: {name} is {found!r}; it must be {must_be}")
