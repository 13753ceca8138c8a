"""Rotary embedding fields, in the spelling of transformers 5 (`rope_parameters`) and the older one."""

from __future__ import annotations

from onekernel.config import RopeScaling
from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures.fields import Fields

DEFAULT_THETA = 10000.0

_KINDS = ("default", "linear", "dynamic", "llama3")


def rope(config: Fields) -> tuple[float, RopeScaling]:
    """Return (theta, scaling). Scaling of another kind, and rotation of a part of each head, are refused by name."""
    parameters = config.inner("rope_parameters")
    scaling = parameters or config.inner("rope_scaling") or Fields({})
    theta = (parameters or config).real("rope_theta", config.real("rope_theta", DEFAULT_THETA))
    for place in (scaling, config):
        if (part := place.real("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedModelError(
                f"partial_rotary_factor is {part}: rotating a part of each head is not built in; use transformers"
            )
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return theta, RopeScaling()
    factor = scaling.real("factor") if kind in _KINDS else 1.0
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling("linear" if kind == "linear" else "dynamic", factor)
    if kind == "llama3":
        return theta, _llama3(scaling, factor)
    raise UnsupportedModelError(
        f"RoPE scaling is {kind!r}, which is not built in; known are {', '.join(_KINDS)}: use vLLM or transformers"
    )


def _llama3(scaling: Fields, factor: float) -> RopeScaling:
    low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
    if low >= high:
        raise ModelError(
            f"{scaling.where}: low_freq_factor is {low}; it must be below high_freq_factor, which is {high}"
        )
    return RopeScaling("llama3", factor, low, high, scaling.whole("original_max_position_embeddings"))
