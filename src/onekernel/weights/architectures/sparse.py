"""The published activation-sparse models (arXiv 2603.23198): a Llama or Qwen2 trained with ReLU and an L1 penalty.

Their config.json keeps the base model's hidden_act, mostly silu, which the weights were not trained with: their model
class has ReLU whatever the config says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onekernel.config import ModelConfig
from onekernel.errors import UnsupportedModelError
from onekernel.weights.architectures import llama, qwen2
from onekernel.weights.architectures.fields import Fields

_BASES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "SparseLlamaForCausalLM": llama.config,
    "SparseQwen2ForCausalLM": qwen2.config,
}
_MODEL_TYPES = {"llama_sparse_relu": "SparseLlamaForCausalLM", "qwen2_sparse_relu": "SparseQwen2ForCausalLM"}


def is_sparse(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of a published sparse model, by its model_type or its architecture."""
    named = hf.get("architectures")
    first = named[0] if isinstance(named, (list, tuple)) and named else None
    return hf.get("model_type") in _MODEL_TYPES or first in _BASES


def architecture(hf: Mapping[str, Any], named: str) -> str:
    """Return the architecture that a model_type stands for, else the one that is named."""
    return _MODEL_TYPES.get(str(hf.get("model_type")), named)


def _reader(name: str) -> Callable[[Mapping[str, Any]], ModelConfig]:
    def config(hf: Mapping[str, Any]) -> ModelConfig:
        fields = Fields(hf)
        if not fields.flag("sparsity_gated_mlp", True):
            raise UnsupportedModelError(
                "the model's feed-forward has no gate (sparsity_gated_mlp is false), which only ops.sparse.sparse_ffn "
                "computes; whole models of this kind are not built in"
            )
        inner = fields.whole("sparsity_new_intermediate_size", fields.whole("intermediate_size"))
        base = _BASES[name]({**hf, "hidden_act": "relu", "intermediate_size": inner})
        return replace(base, architecture=name)

    return config


READERS = {name: _reader(name) for name in _BASES}
