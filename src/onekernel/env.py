"""Every environment variable this package reads, in one list (`onekernel env` prints it)."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does, and whether we or another tool define it."""

    name: str
    meaning: str
    ours: bool = True


VARIABLES = (
    Variable(
        "ONEKERNEL_CACHE_DIR",
        "folder for compiled kernels (default: $XDG_CACHE_HOME/onekernel or ~/.cache/onekernel)",
    ),
    Variable("ONEKERNEL_API_KEY", "key that `onekernel serve` asks of its clients"),
    Variable("ONEKERNEL_LOG", "log level: debug, info, warning (default) or error"),
    Variable("ONEKERNEL_NVCC", "path of an nvcc to compile with instead of NVRTC (debugging)"),
    Variable("HF_HOME", "the Hugging Face cache folder", ours=False),
    Variable("HF_TOKEN", "token for gated repositories", ours=False),
    Variable("HF_HUB_OFFLINE", "1: never touch the network", ours=False),
    Variable("CUDA_VISIBLE_DEVICES", "which GPUs the process sees", ours=False),
    Variable("CUDA_MPS_PIPE_DIRECTORY", "where NVIDIA's Multi-Process Service has its pipes", ours=False),
    Variable("NO_COLOR", "set: no colours or dimming", ours=False),
)


def get(name: str) -> str | None:
    """Return the value of a listed variable, or None if it is unset or empty; an unlisted name is a KeyError."""
    if all(variable.name != name for variable in VARIABLES):
        raise KeyError(f"{name} is not in onekernel.env.VARIABLES; list it there")
    return os.environ.get(name) or None


@cache
def cache_dir() -> Path:
    """Return a writable cache folder: ONEKERNEL_CACHE_DIR, else XDG, else a private temporary one."""
    candidates = []
    if override := get("ONEKERNEL_CACHE_DIR"):
        candidates.append(Path(override))
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(xdg) / "onekernel")
    else:
        with contextlib.suppress(RuntimeError):  # no HOME and no passwd entry
            candidates.append(Path.home() / ".cache" / "onekernel")
    for path in candidates:
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK | os.X_OK):
                return path
    fallback = Path(tempfile.mkdtemp(prefix="onekernel-cache-"))
    logging.getLogger(__name__).warning(
        "no writable cache folder (%s): compiled kernels go to %s and are lost with it",
        ", ".join(map(str, candidates)) or "there is no home folder",
        fallback,
    )
    return fallback
