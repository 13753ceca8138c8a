"""Tiny GGUF files, written by the `gguf` package the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from tests.unit.weights.tiny import CONFIG, tensors

METADATA: dict[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 128,
    "rope.freq_base": 10000.0,
}
"""`tiny.CONFIG` in llama.cpp's words, without the architecture's prefix."""

_ARCHITECTURES = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}


def permute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Order q or k rows as llama.cpp's converter does for the llama architecture."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def random_blocks(rows: int, columns: int, kind: Type) -> npt.NDArray[np.uint8]:
    """Return blocks of any type: random bytes, with small finite float16 scales where the type has them."""
    draw = np.random.default_rng(int(kind))
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scales = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}.get(kind, ())
    for at in scales:
        blocks[:, at : at + 2] = draw.uniform(-1, 1, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    saved: dict[str, torch.Tensor],
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    kind: Type = Type.F32,
    *,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    raw: dict[str, tuple[npt.NDArray[Any], Type]] | None = None,
    **general: Any,
) -> Path:
    """Write tensors under their GGUF names: matrices as `kind`, the rest as F32; `raw` ones with bytes as they are.

    `metadata` is prefixed with the architecture; `general` has full keys, with _ _ for dots.
    """
    values = METADATA if metadata is None else metadata
    writer = gguf.GGUFWriter(path, arch, endianess=endianess)
    for key, value in values.items():
        _add(writer, f"{arch}.{key}", value)
    for key, value in general.items():
        _add(writer, key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[arch], values["block_count"])
    for name, tensor in saved.items():
        data = tensor.to(torch.float32).numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = "attention.head_count" if ".q_proj." in name else "attention.head_count_kv"
            data = permute(data, values[heads])
        stored = kind if data.ndim == 2 else Type.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quantize(data, stored), raw_dtype=stored
        )
    for name, (blocks, stored) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write `tiny.CONFIG` as a llama GGUF, with other metadata or options of `write_gguf`."""
    return write_gguf(folder / "tiny.gguf", tensors(CONFIG), metadata=METADATA | (changes or {}), **options)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
