"""The one exception tree. Every message says what value was found, what the limit is and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class OnekernelError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(OnekernelError, ValueError):
    """A value given by the caller is out of range or contradicts another one."""


class DenseOnlyError(ConfigError):
    """A model's feed-forwards cannot read only the neurons that fire; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"sparse feed-forwards are not possible: {reason}; plan them as dense ones")


class ModelError(OnekernelError):
    """A model's files are missing, damaged or inconsistent."""


class UnsupportedModelError(ModelError):
    """The model is of a kind that is refused by name; the message says what to use instead."""


class HubError(ModelError):
    """A model could not be fetched from the hub: not found, gated, offline, no space."""


class TemplateError(OnekernelError, ValueError):
    """The chat template is missing, does not parse, or refused the messages (its own words are in the message)."""


class ContextLengthError(OnekernelError, ValueError):
    """The prompt does not fit the context; nothing was cut."""

    def __init__(self, prompt_tokens: int, max_context: int, model_limit: int, *, at_least: bool = False) -> None:
        """at_least: the prompt has `prompt_tokens` or more; it was refused before it was encoded."""
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context
        self.model_limit = model_limit
        self.at_least = at_least
        if at_least and prompt_tokens < model_limit:
            advice = f"shorten the prompt, or start with a larger --ctx-size (the model allows {model_limit})"
        elif prompt_tokens < model_limit:
            advice = f"start with --ctx-size {prompt_tokens + 1} or more (the model allows {model_limit})"
        else:
            advice = f"shorten the prompt (the model's own limit is {model_limit})"
        least = "at least " if at_least else ""
        super().__init__(
            f"the prompt has {least}{prompt_tokens} tokens and leaves no room for an answer in a context of "
            f"{max_context} tokens; {advice}"
        )


class MemoryLimitError(OnekernelError):
    """Weights, KV cache and workspace do not fit the device."""

    def __init__(self, message: str, needed_bytes: int, free_bytes: int, largest_context: int) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.largest_context = largest_context
        super().__init__(message)


class QueueFullError(OnekernelError):
    """As many requests wait as may; this one was not taken."""

    def __init__(self, waiting: int, limit: int) -> None:
        self.waiting = waiting
        self.limit = limit
        super().__init__(
            f"{waiting} requests wait and at most {limit} may; try again later, or start with a larger --max-waiting"
        )


class PlanError(OnekernelError):
    """A plan of the megakernel is unsound or stands still; the message names the phase, the CTA and the words."""


class NumericError(OnekernelError):
    """The model produced non-finite logits, so no token can be chosen."""


class TrainingError(OnekernelError):
    """A training run cannot start or go on: its text, its checkpoint or its disk; what was written before is whole."""


class CompileError(OnekernelError):
    """A kernel did not compile; carries the first compiler error, the options and the kept source's folder."""

    def __init__(
        self, message: str, first_error: str = "", options: tuple[str, ...] = (), source_path: Path | None = None
    ) -> None:
        self.first_error = first_error
        self.options = options
        self.source_path = source_path
        super().__init__(message)


class DeviceError(OnekernelError):
    """The device, its driver or a running kernel failed or does not meet what is needed.

    `context_lost` means that this process can no longer use the device: it must end and be started again.
    """

    def __init__(self, message: str, context_lost: bool = False) -> None:
        self.context_lost = context_lost
        super().__init__(message)


class EngineClosedError(OnekernelError):
    """The engine was closed, or failed earlier for the stated reason, and takes no more requests."""
