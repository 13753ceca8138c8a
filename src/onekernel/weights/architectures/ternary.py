"""What a config.json says about ternary weights: `quantization_config` with quant_method "bitnet".

Fields are those of transformers' BitNetQuantConfig; `group_size` and `head` are ours, for what it cannot state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from onekernel.config import Ternary
from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures.fields import Fields

QUANT_METHOD = "bitnet"

_KEY = "quantization_config"
_HEADS = ("dense", "ternary", "int8")

Convention = Literal["multiply", "divide"]
"""Whether a stored weight_scale is the scale or its reciprocal."""


def ternary(config: Fields, *, always: bool = False) -> Ternary | None:
    """Return how the projections are ternary, or None if they are not; `always`: they are, even if nothing is said."""
    stated = _stated(config)
    if stated is None:
        return Ternary() if always else None
    if stated.flag("use_rms_norm", False):
        raise UnsupportedModelError(
            "quantization_config has use_rms_norm: a norm inside each projection is not built in; use transformers"
        )
    head = stated.text("head", "dense")
    if head not in _HEADS:
        raise ModelError(f"{stated.where}: head is {head!r}; it must be {', '.join(_HEADS)}")
    return Ternary(stated.whole_or_none("group_size"), cast("Literal['dense', 'ternary', 'int8']", head))


def scale_convention(hf: Mapping[str, Any]) -> Convention:
    """Return what a stored weight_scale does: linear_class "autobitlinear" multiplies by it, "bitlinear" divides.

    The second is transformers' default. Raises UnsupportedModelError for another class.
    """
    stated = _stated(Fields(hf))
    named = "bitlinear" if stated is None else stated.text("linear_class", "bitlinear")
    if named not in ("autobitlinear", "bitlinear"):
        raise UnsupportedModelError(
            f"quantization_config's linear_class is {named!r}, whose scales are unknown; it must be "
            "autobitlinear or bitlinear"
        )
    return "multiply" if named == "autobitlinear" else "divide"


def _stated(config: Fields) -> Fields | None:
    found = config.inner(_KEY)
    return found if found is not None and found.text("quant_method", "").lower() == QUANT_METHOD else None
