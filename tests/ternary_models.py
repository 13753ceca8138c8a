"""Small random ternary models in every layout that is published, written without the package's own packing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Floats = npt.NDArray[np.float64]

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

BITNET = SHAPE | {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "hidden_act": "relu2",
    "tie_word_embeddings": True,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": None,
    },
}
"""As bitnet-b1.58-2B-4T: scales multiply."""

LLAMA = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": None},
}
"""As Llama3-8B-1.58, Falcon3-1.58bit and Falcon-E: the older class, scales divide."""

FIRST = SHAPE | {
    "architectures": ["BitnetForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 300,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "weight_bits": 1,
    "input_bits": 8,
    "torch_dtype": "float16",
}
"""As bitnet_b1_58-3B: heads of 100, masters in fp16, other names of the sub-norms."""

QWEN = SHAPE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 32,
    "tie_word_embeddings": True,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "group_size": 128,
        "head": "ternary",
    },
}
"""A ternary Qwen3 with group scales, its embedding and head ternary as well."""


@dataclass(frozen=True, slots=True)
class TernaryModel:
    """A model as numbers: codes int8 and scales (1, 1) or (N, groups) of ternary matrices, float32 of what is dense."""

    config: dict[str, Any]
    codes: dict[str, npt.NDArray[np.int8]]
    scales: dict[str, npt.NDArray[np.float32]]
    dense: dict[str, torch.Tensor]
    heads: tuple[int, int, int] = field(default=(0, 0, 0))
    """Query heads, KV heads, head_dim."""

    def values(self, name: str) -> Floats:
        """A ternary matrix in float64."""
        codes, scales = self.codes[name].astype(np.float64), self.scales[name].astype(np.float64)
        return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def make(config: dict[str, Any], seed: int = 0) -> TernaryModel:
    """Draw a model. Every projection has a scale of its own, far from the others', so that a swap shows."""
    draw = np.random.default_rng(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    quantization = config.get("quantization_config", {})
    group = quantization.get("group_size")
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    names = {f"model.layers.{i}.{n}.weight": s for i in range(config["num_hidden_layers"]) for n, s in shapes.items()}
    ternary_ends = quantization.get("head") == "ternary"
    if ternary_ends:
        names["model.embed_tokens.weight"] = (vocab, hidden)
    codes = {name: draw.integers(-1, 2, shape, dtype=np.int8) for name, shape in names.items()}
    scales = {}
    for name, (rows, columns) in names.items():
        size = (1, 1) if group is None else (rows, columns // group)
        low, high = (0.02, 0.04) if "embed" in name else (0.6, 2.4)
        drawn = torch.from_numpy(draw.uniform(low, high, size) / (1 if "embed" in name else np.sqrt(columns)))
        scales[name] = drawn.to(torch.bfloat16).float().numpy()  # what bf16 and, of this size, fp16 hold exactly
    dense = {}

    def norm(name: str, size: int) -> None:
        dense[f"{name}.weight"] = _bf16(draw.normal(1.0, 0.2, size))

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if "itnet" in config["architectures"][0] or "BitNet" in config["architectures"][0]:
            norm(f"{layer}.self_attn.attn_sub_norm", heads * head_dim)
            norm(f"{layer}.mlp.ffn_sub_norm", inner)
        if "Qwen3" in config["architectures"][0]:
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
    norm("model.norm", hidden)
    if not ternary_ends:
        dense["model.embed_tokens.weight"] = _bf16(draw.normal(0, 0.05, (vocab, hidden)))
        if not config["tie_word_embeddings"]:
            dense["lm_head.weight"] = _bf16(draw.normal(0, 0.1, (vocab, hidden)))
    return TernaryModel(config, codes, scales, dense, (heads, kv_heads, head_dim))


def hf_pack(codes: npt.NDArray[np.int8]) -> torch.Tensor:
    """Hugging Face's packing, row by row."""
    height = -(-codes.shape[0] // 4)
    packed = np.zeros((height, codes.shape[1]), np.uint8)
    for row, values in enumerate(codes):
        packed[row % height] += ((values + 1) << 2 * (row // height)).astype(np.uint8)
    return torch.from_numpy(packed)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_packed(folder: Path, model: TernaryModel) -> Path:
    """Write uint8 codes and bf16 scales, or their reciprocals where the config's class divides by them."""
    divides = model.config["quantization_config"].get("linear_class") != "autobitlinear"
    saved = {name: tensor.to(torch.bfloat16) for name, tensor in model.dense.items()}
    for name, codes in model.codes.items():
        saved[name] = hf_pack(codes)
        scale = torch.from_numpy(model.scales[name])
        scale = scale.view(1) if scale.numel() == 1 else scale
        stored = (1 / scale if divides else scale).to(torch.bfloat16 if scale.numel() == 1 else torch.float32)
        saved[name + "_scale"] = stored
    write_config(folder, model.config)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_masters(folder: Path, model: TernaryModel, names: dict[str, str] | None = None) -> TernaryModel:
    """Write float masters that absmean turns into the model's codes, and return the model with the scales they have."""
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[
        model.config["torch_dtype"]
    ]
    draw = np.random.default_rng(7)
    saved = {_renamed(name, names): tensor.to(dtype) for name, tensor in model.dense.items()}
    scales = {}
    for name, codes in model.codes.items():
        saved[name] = _masters(codes, model.scales[name], draw).to(dtype)
        scales[name] = saved[name].abs().to(torch.float64).mean().float().numpy().reshape(1, 1)
    quantization = model.config.get("quantization_config")
    online = {} if quantization is None else {"quantization_config": quantization | {"quantization_mode": "online"}}
    write_config(folder, model.config | online)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(model, scales=scales)


def write_expanded(folder: Path, model: TernaryModel) -> Path:
    """Write every ternary matrix as float32 values, as 'unpacked' checkpoints have them."""
    saved = dict(model.dense) | {name: torch.from_numpy(model.values(name)).float() for name in model.codes}
    write_config(folder, model.config)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _masters(codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], draw: np.random.Generator) -> torch.Tensor:
    """Values whose absolute mean is near the scale, spread over both sides of it but off the thresholds."""
    sizes = np.where(codes == 0, draw.uniform(0.0, 0.3, codes.shape), draw.uniform(0.8, 2.0, codes.shape))
    signs = np.where(codes == 0, draw.choice([-1, 1], codes.shape), codes)
    sizes *= np.where(codes == 0, 1, (codes.size - sizes[codes == 0].sum()) / sizes[codes != 0].sum())
    return torch.from_numpy(signs * sizes * scales)


def write_gguf(path: Path, model: TernaryModel, kind: str, arch: str) -> Path:
    """Write a GGUF with ternary tensors of `kind`: I2_S, TQ1_0, TQ2_0, Q2_0 (blocks of 64) or Q2_0_128."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads, head_dim = model.heads
    for key, value in {
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "context_length": config["max_position_embeddings"],
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    names = _gguf_names(config["num_hidden_layers"])
    for name, tensor in model.dense.items():
        stored = tensor.to(torch.float16).numpy() if tensor.ndim == 2 else tensor.numpy()
        writer.add_tensor(names[name], stored)
    for name, own in model.codes.items():
        codes, scales = own, model.scales[name]
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
        if arch == "llama" and count:
            codes, scales = _permute(codes, count), _permute(scales, count) if len(scales) > 1 else scales
        data, number = _gguf_bytes(codes, scales, kind)
        # As int8 the writer takes the shape as it is and any number for a type: it does not know them all.
        writer.add_tensor(names[name], data.view(np.int8), codes.shape, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_bytes(
    codes: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], kind: str
) -> tuple[npt.NDArray[np.uint8], int]:
    stored = (codes + 1).astype(np.uint8)
    rows, columns = codes.shape
    if kind in ("TQ1_0", "TQ2_0"):
        number = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quantize(codes.astype(np.float32), number).reshape(rows, columns // 256, -1)
        halves = np.repeat(scales, columns // 256 // scales.shape[1], axis=1).astype("<f2")
        blocks[..., -2:] = np.broadcast_to(halves, (rows, columns // 256))[..., None].copy().view(np.uint8)
        return blocks.reshape(rows, -1), int(number)
    if kind == "I2_S":
        windows = stored.reshape(-1, 4, 32)
        packed = windows[:, 0] << 6 | windows[:, 1] << 4 | windows[:, 2] << 2 | windows[:, 3]
        trailer = np.zeros(8, "<f4")
        trailer[0] = scales[0, 0]
        return np.concatenate([packed.reshape(-1), trailer.view(np.uint8)]), 36
    group = 128 if kind == "Q2_0_128" else 64
    fours = stored.reshape(rows, columns // group, group // 4, 4)
    packed = fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
    halves = np.broadcast_to(
        np.repeat(scales, max(1, columns // group // scales.shape[1]), axis=1), (rows, columns // group)
    )
    return np.concatenate([halves.astype("<f2")[..., None].copy().view(np.uint8), packed], axis=2).reshape(rows, -1), 42


def _permute(rows: Any, heads: int) -> Any:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _gguf_names(layers: int) -> dict[str, str]:
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.attn_sub_norm": "attn_sub_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.ffn_sub_norm": "ffn_sub_norm",
    }
    names = {
        f"model.layers.{i}.{ours}.weight": f"blk.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in parts.items()
    }
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return names | {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in ends.items()}


def _bf16(values: Floats) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.bfloat16).float()


def _renamed(name: str, names: dict[str, str] | None) -> str:
    for ours, theirs in (names or {}).items():
        name = name.replace(ours, theirs)
    return name


def with_scales(model: TernaryModel, scales: dict[str, npt.NDArray[np.float32]]) -> TernaryModel:
    """Return the model with other scales."""
    return replace(model, scales=scales)


def grouped(config: dict[str, Any], group: int) -> dict[str, Any]:
    """Return the config with groups of another size."""
    return config | {"quantization_config": config["quantization_config"] | {"group_size": group}}


def write_published(folder: Path, model: TernaryModel) -> Path:
    """Write model_state_int2.pt as microsoft/BitNet's GPU engine converts it, with a config.json beside it."""
    heads, kv_heads, _ = model.heads
    state: dict[str, torch.Tensor] = {}
    dense = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.attn_sub_norm": "attention.attn_sub_norm",
        "mlp.ffn_sub_norm": "feed_forward.ffn_sub_norm",
        "model.layers": "layers",
    }
    for name, tensor in model.dense.items():
        state[_renamed(name, dense)] = tensor.to(torch.bfloat16)
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    fused = {
        "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.wo": ("self_attn.o_proj",),
        "feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward.w2": ("mlp.down_proj",),
    }
    for layer in range(model.config["num_hidden_layers"]):
        for own, names in fused.items():
            parts, scales = [], torch.zeros(4)
            for index, name in enumerate(names):
                codes = model.codes[f"model.layers.{layer}.{name}.weight"]
                turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[1], 0)
                parts.append(_permute(codes, turned) if turned else codes)
                scales[index] = float(model.scales[f"model.layers.{layer}.{name}.weight"].item())
            state[f"layers.{layer}.{own}.weight"] = _blocks16x32(np.concatenate(parts))
            state[f"layers.{layer}.{own}.weight_scale"] = scales.to(torch.bfloat16)
    write_config(folder, model.config)
    torch.save(state, folder / "model_state_int2.pt")
    return folder


def _blocks16x32(codes: npt.NDArray[np.int8]) -> torch.Tensor:
    """Blocks of 16 x 32, each 32 words of 16 columns of a row; column e in bit pair e / 4 of byte e mod 4."""
    rows, columns = codes.shape
    packed = np.zeros(rows * columns // 4, np.uint8)
    words = codes.reshape(rows, columns // 16, 16) + 2
    for n in range(rows):
        for unit in range(columns // 16):
            block = n // 16 * (columns // 32) + unit // 2
            word = block * 32 + n % 16 // 8 * 16 + unit % 2 * 8 + n % 8
            for element, code in enumerate(words[n, unit]):
                packed[4 * word + element % 4] |= int(code) << 2 * (element // 4)
    return torch.from_numpy(packed.view(np.int8).reshape(rows, columns // 4))
