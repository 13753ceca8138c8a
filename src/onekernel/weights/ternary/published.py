"""Checkpoints that microsoft/BitNet's GPU engine converts: model_state_int2.pt, read beside the model's config.json.

The file is a pickled dictionary; PyTorch reads it as tensors only. Projections are fused, permuted blocks of 16 x 32
(`Blocks16x32`) with four bf16 scales, of which the fused ones come first; q and k rows alternate the two halves of each
head. The published kernel gives the fused rows their scales in equal shares, which is wrong where q, k and v differ in
rows; here each projection has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onekernel.errors import ConfigError, ModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import CheckpointSettings, TensorInfo
from onekernel.weights.ternary import oracle
from onekernel.weights.ternary.blocks16x32 import Blocks16x32
from onekernel.weights.ternary.matrix import TernaryMatrix
from onekernel.weights.ternary.packed import STRIP_ROWS
from onekernel.weights.ternary.scales import check_scales

FILE = "model_state_int2.pt"

_DENSE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.attn_sub_norm.weight": "self_attn.attn_sub_norm.weight",
    "feed_forward.ffn_sub_norm.weight": "mlp.ffn_sub_norm.weight",
}
_FUSED = {
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w2": ("mlp.down_proj",),
}


class PublishedCheckpoint:
    """The `Checkpoint` of a converted directory; its projections are `TernaryBlocks`."""

    def __init__(self, directory: Path, settings: CheckpointSettings) -> None:
        """Map the file and find every tensor; raises ModelError if it is damaged or lacks some."""
        self.settings = settings
        self._path = directory / FILE
        self._state = _load(self._path)
        self._config = model_config(settings.config)
        self._dense = self._find_dense()
        self._tensors = {name: _info(self._state[own]) for name, own in self._dense.items()}
        self._projections: dict[str, tuple[str, int]] = {}
        for layer in range(self._config.num_hidden_layers):
            for own, names in _FUSED.items():
                for index, name in enumerate(names):
                    self._add_projection(f"layers.{layer}.{own}", index, f"model.layers.{layer}.{name}.weight")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, projections one by one."""
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        """Return a dense tensor."""
        return self._state[self._dense[name]]

    def holds_ternary(self, name: str) -> bool:
        """Whether a tensor is a projection."""
        return name in self._projections

    def ternary(self, name: str) -> TernaryMatrix:
        """Return a projection, its rows in Hugging Face's order."""
        own, index = self._projections[name]
        rows, stored = self._rows(own), self._state[f"{own}.weight"]
        first, count = sum(rows[:index]), rows[index]
        start, end = first // STRIP_ROWS * STRIP_ROWS, first + count + -(first + count) % STRIP_ROWS
        scale = self._state[f"{own}.weight_scale"][index : index + 1].float()
        try:
            strips = Blocks16x32.from_published(stored[start:end], scale)
        except ConfigError as error:
            raise ModelError(f"{own} in {self._path}: {error}") from error
        codes = strips.unpack_codes()[first - start :][:count]
        if _is_turned(name):
            halves = codes.view(count // self._config.head_dim, -1, 2, codes.shape[1]).transpose(1, 2)
            codes = halves.reshape(codes.shape)
        return TernaryMatrix(codes, scale)

    def oracle_rows(self, name: str, rows: Sequence[int]) -> oracle.Rows:
        """Return rows of a projection in float64, found without the code of `ternary`."""
        own, index = self._projections[name]
        first = sum(self._rows(own)[:index])
        picked = [first + self._stored_row(name, row) for row in rows]
        scale = float(self._state[f"{own}.weight_scale"][index])
        stored = self._state[f"{own}.weight"]
        return oracle.blocks16x32_rows(stored.view(torch.uint8).numpy(), picked, stored.shape[1] * 4) * scale

    def close(self) -> None:
        """Unmap the file."""
        self._state = {}

    def _find_dense(self) -> dict[str, str]:
        layers = range(self._config.num_hidden_layers)
        names = dict(_DENSE) | {
            f"layers.{layer}.{own}": f"model.layers.{layer}.{name}" for layer in layers for own, name in _LAYER.items()
        }
        if self._config.tie_word_embeddings:
            del names["output.weight"]  # the embedding once more
        if lacking := [own for own in names if own not in self._state]:
            raise ModelError(f"{self._path} lacks {', '.join(lacking[:5])}; convert the model again")
        return {name: own for own, name in names.items()}

    def _add_projection(self, own: str, index: int, name: str) -> None:
        if f"{own}.weight" not in self._state or f"{own}.weight_scale" not in self._state:
            raise ModelError(f"{self._path} lacks {own}.weight or its weight_scale; convert the model again")
        stored, rows = self._state[f"{own}.weight"], self._rows(own)
        if stored.dim() != 2 or stored.dtype not in (torch.int8, torch.uint8):
            raise ModelError(
                f"{own}.weight in {self._path} is {stored.dtype} of shape {tuple(stored.shape)}; it must be int8 "
                f"({sum(rows)}, K / 4): convert the model again"
            )
        scales = self._state[f"{own}.weight_scale"]
        if scales.dim() != 1 or len(scales) < len(rows) or not scales.is_floating_point():
            raise ModelError(
                f"{own}.weight_scale in {self._path} is {scales.dtype} of shape {tuple(scales.shape)}; it must hold "
                f"{len(rows)} or more floats: convert the model again"
            )
        check_scales(scales[: len(rows)].float(), f"{own}.weight_scale in {self._path}")
        if stored.shape[0] != sum(rows):
            raise ModelError(f"{own} in {self._path} has {stored.shape[0]} rows; the config asks for {sum(rows)}")
        self._projections[name] = own, index
        columns = stored.shape[1] * 4
        self._tensors[name] = TensorInfo((rows[index], columns), "INT2", rows[index] * columns // 4)

    def _rows(self, own: str) -> tuple[int, ...]:
        config = self._config
        part = own.rpartition(".")[2]
        if part == "wqkv":
            return config.q_size, config.kv_size, config.kv_size
        return (config.intermediate_size,) * 2 if part == "w13" else (config.hidden_size,)

    def _stored_row(self, name: str, row: int) -> int:
        """Return where a projection's row stands in it."""
        return oracle.interleaved_row(row, self._config.head_dim) if _is_turned(name) else row


def _is_turned(name: str) -> bool:
    """Whether a projection's rows are in the order of interleaved rotation."""
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises whatever its instructions happen to: IndexError, KeyError, ...
        raise ModelError(
            f"{path} cannot be read as tensors alone ({type(error).__name__}: {error}); convert the model again"
        ) from error
    if not isinstance(state, dict) or not all(map(_is_plain, state.values())):
        raise ModelError(f"{path} is no dictionary of tensors; convert the model again")
    return state


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"


def _info(tensor: torch.Tensor) -> TensorInfo:
    kinds = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    return TensorInfo(tuple(tensor.shape), kinds.get(tensor.dtype, str(tensor.dtype)), tensor.nbytes)
