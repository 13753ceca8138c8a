"""From llama.cpp's names to Hugging Face's: tensors, and metadata to the keys of a config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures.fields import Fields
from onekernel.weights.gguf_header import GgufTensor
from onekernel.weights.ternary.gguf_blocks import KINDS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "bitnet": "BitnetForCausalLM",
    "bitnet-b1.58": "BitNetForCausalLM",
}
"""general.architecture -> the architecture of a config.json. Mistral's files say llama too."""

PERMUTED = ("llama",)
"""Architectures whose converter interleaves the two halves of each head's q and k rows."""

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DTYPES = {"F32": "float32", "F16": "float16"}
_PROJECTION = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight")


def tensor_name(name: str) -> str:
    """Return Hugging Face's name of a GGUF tensor; one without a counterpart keeps its own."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_WHOLE[part]}.{kind}" if part in _WHOLE else name


def hf_config(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], path: str) -> dict[str, Any]:
    """Return what config.json would say, without the RoPE scaling that a tensor may hold (see `gguf_rope`).

    Raises UnsupportedModelError for other architectures and kinds, ModelError for a missing key.
    """
    keys = Fields(metadata, f"the metadata of {path}")
    arch = _architecture(keys, path)
    heads = keys.whole(f"{arch}.attention.head_count")
    hidden = keys.whole(f"{arch}.embedding_length")
    head_dim = keys.whole(f"{arch}.attention.key_length", hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (found := keys.whole(key, head_dim)) != head_dim:
            raise UnsupportedModelError(
                f"{path} has {key} = {found} but heads of {head_dim}; heads of two sizes, or rotated in part, are not "
                "built in: use llama.cpp"
            )
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight; it holds no whole model: fetch it again")
    embedding = tensors["token_embd.weight"]
    window = keys.whole_or_none(f"{arch}.attention.sliding_window", low=0) or None  # 0: none
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if arch == "llama" and window else ARCHITECTURES[arch]],
        "hidden_size": hidden,
        "intermediate_size": keys.whole(f"{arch}.feed_forward_length"),
        "num_hidden_layers": keys.whole(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": keys.whole(f"{arch}.context_length"),
        "rms_norm_eps": keys.real(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(arch, keys),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
        "dtype": _DTYPES.get(embedding.type.name, "bfloat16"),
    }
    if quantization := _ternary(tensors, path):
        config["quantization_config"] = quantization
    return config | {f"{name}_token_id": token for name, token in _special_tokens(keys, ("bos", "eos"))}


def generation_config(metadata: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return what generation_config.json would say: every token that ends an answer, and sampling values if any."""
    keys = Fields(metadata, f"the metadata of {path}")
    found: dict[str, Any] = {"eos_token_id": sorted({token for _, token in _special_tokens(keys, ("eos", "eot"))})}
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    sampling = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    if sampling["temperature"]:
        found |= {name: value for name, value in sampling.items() if value is not None} | {"do_sample": True}
    return found


def _special_tokens(keys: Fields, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (name, id) of those special tokens that the metadata has."""
    ids = [(name, keys.whole_or_none(f"tokenizer.ggml.{name}_token_id", low=0)) for name in names]
    return [(name, token) for name, token in ids if token is not None]


def _architecture(keys: Fields, path: str) -> str:
    if (kind := keys.text("general.type", "model")) != "model":
        raise UnsupportedModelError(f"{path} holds a GGUF of type {kind!r}, not a model; give the model's own file")
    if (parts := keys.whole("split.count", 1, low=0)) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {parts} parts; join them with llama.cpp: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )
    arch = keys.text("general.architecture", "")
    if arch not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} is of architecture {arch!r}, which is not built in; known are {', '.join(ARCHITECTURES)}: "
            "use llama.cpp"
        )
    if experts := keys.whole(f"{arch}.expert_count", 0, low=0):
        raise UnsupportedModelError(f"{path} is a mixture of {experts} experts, which is not built in; use llama.cpp")
    return arch


def _ternary(tensors: Mapping[str, GgufTensor], path: str) -> dict[str, Any] | None:
    """Return the quantization_config of a file with ternary projections, without their group, or None."""
    kinds = {tensors[name].type.name for name in tensors if _PROJECTION.fullmatch(name)}
    if not kinds & KINDS.keys():
        return None
    if not kinds <= KINDS.keys():
        raise UnsupportedModelError(
            f"{path} has projections of types {', '.join(sorted(kinds))}; ternary ones beside others are not built in"
        )
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    ends = {head.type.name in KINDS, tensors["token_embd.weight"].type.name in KINDS}
    if len(ends) > 1:
        raise UnsupportedModelError(f"{path}: of embedding and head one is ternary, which is not built in")
    return {"quant_method": "bitnet", "head": "ternary" if ends == {True} else "dense"}


def _rope_scaling(arch: str, keys: Fields) -> dict[str, Any] | None:
    kind = keys.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": keys.real(f"{arch}.rope.scaling.factor", 1.0)}
