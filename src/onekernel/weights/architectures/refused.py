"""Kinds of models that are refused by name, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from onekernel.errors import UnsupportedModelError
from onekernel.weights.architectures.ternary import QUANT_METHOD

_FULL_WEIGHTS = "use the original bf16 or fp16 safetensors of this model, or a GGUF of it"

_QUANTIZATIONS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8 (FBGEMM)",
    "exl2": "EXL2",
    "exl3": "EXL3",
}


def refuse_quantized(hf: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if config.json says that the weights are quantised, in another way than ternary."""
    found = hf.get("quantization_config")
    if isinstance(found, Mapping):
        method = str(found.get("quant_method", "unknown"))
        if method.lower() == QUANT_METHOD:
            return
        name = _QUANTIZATIONS.get(method.lower(), repr(method))
        raise UnsupportedModelError(f"the weights are quantised with {name}, which is not built in; {_FULL_WEIGHTS}")
    mlx = hf.get("quantization")
    if isinstance(mlx, Mapping):  # mlx-lm writes {"group_size": 64, "bits": 4} under this key
        raise UnsupportedModelError(f"the weights are quantised with MLX, which is not built in; {_FULL_WEIGHTS}")


def refuse_unknown(architecture: str, known: tuple[str, ...]) -> NoReturn:
    """Raise UnsupportedModelError for an architecture that has no file here."""
    lower = architecture.lower()
    if "moe" in lower or "mixtral" in lower:
        kind = "mixtures of experts are not built in; use vLLM or llama.cpp for it"
    elif lower.endswith("forconditionalgeneration") or "vision" in lower or "vl" in lower:
        kind = "models with images, audio or an encoder are not built in; use the text-only model of its family"
    else:
        kind = f"it is not built in; known are {', '.join(known)}; use vLLM or transformers for others"
    raise UnsupportedModelError(f"the model's architecture is {architecture}: {kind}")
