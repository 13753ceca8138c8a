"""Generate text on one GPU at the memory limit.

Public names are resolved on first use, so that ``import onekernel`` (and ``onekernel --help``) costs no torch import.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; typing itself takes 10 ms, in which Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

    from onekernel.config import ModelConfig as ModelConfig
    from onekernel.config import SamplingParams as SamplingParams
    from onekernel.engine.request import Completion as Completion
    from onekernel.engine.request import Delta as Delta
    from onekernel.errors import OnekernelError as OnekernelError
    from onekernel.llm import LLM as LLM
    from onekernel.llm import AsyncLLM as AsyncLLM

__version__ = "0.1.0"

_HOME = {
    "LLM": "onekernel.llm",
    "AsyncLLM": "onekernel.llm",
    "Completion": "onekernel.engine.request",
    "Delta": "onekernel.engine.request",
    "ModelConfig": "onekernel.config",
    "SamplingParams": "onekernel.config",
    "OnekernelError": "onekernel.errors",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'onekernel' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
