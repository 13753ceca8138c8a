"""The fields every Llama-class decoder shares."""

from __future__ import annotations

from typing import Literal, cast

from onekernel.config import ModelConfig
from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures.fields import Fields
from onekernel.weights.architectures.rope import rope
from onekernel.weights.architectures.ternary import ternary

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2"}
_DTYPES = ("bfloat16", "float16", "float32")


def decoder(
    config: Fields,
    *,
    architecture: str,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
    sub_norms: bool = False,
    always_ternary: bool = False,
) -> ModelConfig:
    """Return the `ModelConfig` of the shared fields and of what the architecture's own file adds.

    `head_dim` is the architecture's default; None means hidden_size / num_attention_heads. `always_ternary`: the
    weights are ternary even if there is no quantization_config.
    """
    theta, scaling = rope(config)
    heads = config.whole("num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        hidden_size=config.whole("hidden_size"),
        intermediate_size=config.whole("intermediate_size"),
        num_hidden_layers=config.whole("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", head_dim or _even_share(config)),
        vocab_size=config.whole("vocab_size"),
        max_position_embeddings=config.whole("max_position_embeddings"),
        rms_norm_eps=config.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        hidden_act=_activation(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        dtype=_dtype(config),
        sub_norms=sub_norms,
        ternary=ternary(config, always=always_ternary),
    )


def _even_share(config: Fields) -> int | None:
    """Return hidden_size / num_attention_heads, or None (which makes head_dim required) if that is not whole."""
    share, rest = divmod(config.whole("hidden_size"), config.whole("num_attention_heads"))
    return None if rest else share


def _activation(config: Fields) -> Literal["silu", "relu", "relu2"]:
    named = config.text("hidden_act", "silu")
    if named not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act is {named!r}, which is not built in; known are {', '.join(_ACTIVATIONS)}: use transformers"
        )
    return cast("Literal['silu', 'relu', 'relu2']", _ACTIVATIONS[named])


def _dtype(config: Fields) -> Literal["bfloat16", "float16", "float32"]:
    named = config.text("dtype", config.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if named not in _DTYPES:
        raise ModelError(f"config.json: the dtype is {named!r}; it must be {', '.join(_DTYPES)}")
    return cast("Literal['bfloat16', 'float16', 'float32']", named)
