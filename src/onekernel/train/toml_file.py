"""A TOML file -> a typed structure, strictly: an unknown key or a wrong type is an error that says where and what."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from onekernel.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def read_toml(path: Path, kind: type[T]) -> T:
    """Return the file as a `kind`. Raises ConfigError naming the file, the key, what was found and what it must be."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; name a TOML file") from None
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return convert(values, kind)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def convert(values: Mapping[str, Any], kind: type[T]) -> T:
    """Return nested mappings as a `kind`; see `read_toml` for errors."""
    _refuse_unknown(values, kind, "")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_sentence(str(error), values, kind)) from None


def _refuse_unknown(values: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            known = ", ".join(fields)
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            advice = f"did you mean {where}{near[0]}?" if near else f"known here: {known}"
            raise ConfigError(f"there is no key {where}{key}; {advice}")
        inner = fields[key]
        if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _refuse_unknown(value, inner, f"{where}{key}.")


def _sentence(message: str, values: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.run.steps`" into a sentence with the value found there."""
    what, _, place = message.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", what):
        return f"{f'{path}.' if path else ''}{missing[1]} is missing; it has no default"
    found: Any = values
    for name, index in re.findall(r"(\w+)|\[(\d+|\.\.\.)\]", path):
        if name and isinstance(found, Mapping):
            found = found.get(name)
        elif index.isdigit() and isinstance(found, list):
            found = found[int(index)]
    expected = what[:1].lower() + what[1:].partition(", got")[0]
    if not path:
        return expected.replace("`", "")  # of the file as a whole: a check of its own, which names the keys
    if choices := _choices(kind, path):
        return f"{path} is {found!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}"
    return f"{path} is {found!r}; {expected.replace('`', '')}"


def _choices(kind: Any, path: str) -> list[str]:
    """Return the words that a key may be; none if it is not one of a few words."""
    for name in path.split("."):
        fields = {} if get_args(kind) else {field.name: field.type for field in msgspec.structs.fields(kind)}
        if name not in fields:  # inside of a list
            return []
        kind = fields[name]
    kinds = [kind, *get_args(kind)]  # one that may be left out is a union with None
    return [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
