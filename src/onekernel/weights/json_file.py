"""JSON settings files beside a model, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onekernel.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ModelError if it is missing, unreadable or something else."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, not a JSON object; fetch the file again")
    return parsed
