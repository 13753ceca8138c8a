"""What the files of each architecture say: config.json -> `ModelConfig`.

Pure data, no tensor. Adding an architecture is one small file here with `ARCHITECTURE` and `config`, and its line in
`_MODULES`. The model itself is in `models/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError, ModelError
from onekernel.weights.architectures import bitnet, bitnet_b158, llama, mistral, qwen2, qwen3, sparse
from onekernel.weights.architectures.refused import refuse_quantized, refuse_unknown

_MODULES = (llama, mistral, qwen2, qwen3, bitnet, bitnet_b158)

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    **{module.ARCHITECTURE: module.config for module in _MODULES},
    **sparse.READERS,
}
"""config.json's `architectures[0]` -> the function that reads that config.json."""


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the dimensions and options that a config.json states.

    Raises UnsupportedModelError for a kind of model that is refused by name, ModelError for a missing, mistyped or
    contradictory field.
    """
    refuse_quantized(hf)
    named = hf.get("architectures")
    if not (isinstance(named, (list, tuple)) and named and isinstance(named[0], str)):
        raise ModelError(
            f"config.json's architectures is {named!r}; it must name one, such as {', '.join(ARCHITECTURES)}"
        )
    name = sparse.architecture(hf, named[0])
    read = ARCHITECTURES.get(name)
    if read is None:
        refuse_unknown(name, tuple(ARCHITECTURES))
    try:
        return read(hf)
    except ConfigError as error:
        raise ModelError(f"config.json: {error}") from error
