"""Named tensors -> a model's weights on a device, one copy, one tensor in flight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onekernel.config import ModelConfig
from onekernel.models.model import LayerWeights, ModelWeights
from onekernel.models.packed import PackedModel, allocate, pack_embedding, pack_final_norm, pack_layer, pack_matrix
from onekernel.models.registry import check_tensors
from onekernel.weights.arena import WeightLayout
from onekernel.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]

_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class _Reader:
    """Reads tensors to the device in the wanted dtype and counts them for the progress bar."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: str, progress: Progress
    ) -> None:
        check_tensors(config, checkpoint)
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.done, self.progress = 0, progress
        self.total = sum(1 for name in checkpoint.tensors if "rotary_emb" not in name)

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.checkpoint.read(name).to(device=self.device, dtype=dtype or self.dtype)
        self.done += 1
        self.progress(self.done, self.total)
        return tensor.contiguous()

    def stacked(self, names: tuple[str, ...]) -> torch.Tensor:
        """Return the tensors one under another, filled row block by row block."""
        shapes = [self.checkpoint.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for part, name in zip(whole.split(rows), names, strict=True):
            part.copy_(self(name))
        return whole

    def end(self) -> None:
        """Say that all is read: a tied model may store a head that nobody asks for."""
        self.progress(self.total, self.total)


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, *, dtype: torch.dtype, device: str, progress: Progress
) -> ModelWeights:
    """Read every tensor of the checkpoint to `device`; calls progress(tensors done, tensors in all).

    Raises ModelError naming any missing, extra or mis-shaped tensor before reading the first.
    """
    read = _Reader(checkpoint, config, dtype, device, progress)
    embedding = read(_EMBEDDING)
    layers = tuple(_layer(read, config, index) for index in range(config.num_hidden_layers))
    final_norm = read(_FINAL_NORM, torch.float32)
    head = embedding if config.tie_word_embeddings else read(_HEAD)
    read.end()
    return ModelWeights(embedding, layers, final_norm, head)


def load_packed(
    checkpoint: Checkpoint, config: ModelConfig, layout: WeightLayout, *, device: str, progress: Progress
) -> PackedModel:
    """Read every tensor of the checkpoint straight into the packed form on `device`, a layer at a time.

    See `load_weights` for `progress` and errors.
    """
    read = _Reader(checkpoint, config, torch.bfloat16, device, progress)
    packed = allocate(config, layout, device)
    pack_embedding(packed, read(_EMBEDDING))
    for index in range(config.num_hidden_layers):
        pack_layer(packed, index, _layer(read, config, index))
    pack_final_norm(packed, read(_FINAL_NORM, torch.float32))
    if not config.tie_word_embeddings:
        pack_matrix(packed, "head", 0, read(_HEAD))
    read.end()
    return packed


def _layer(read: _Reader, config: ModelConfig, index: int) -> LayerWeights:
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"

    def rows(prefix: str, names: tuple[str, ...], kind: str = "weight") -> torch.Tensor:
        return read.stacked(tuple(f"{prefix}.{name}.{kind}" for name in names))

    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return LayerWeights(
        attention_norm=read(f"model.layers.{index}.input_layernorm.weight", torch.float32),
        qkv=rows(attention, qkv),
        qkv_bias=rows(attention, qkv, "bias") if config.qkv_bias else None,
        q_norm=read(f"{attention}.q_norm.weight", torch.float32) if config.qk_norm else None,
        k_norm=read(f"{attention}.k_norm.weight", torch.float32) if config.qk_norm else None,
        out=read(f"{attention}.o_proj.weight"),
        out_bias=read(f"{attention}.o_proj.bias") if config.o_bias else None,
        mlp_norm=read(f"model.layers.{index}.post_attention_layernorm.weight", torch.float32),
        gate_up=rows(mlp, gate_up),
        gate_up_bias=rows(mlp, gate_up, "bias") if config.mlp_bias else None,
        down=read(f"{mlp}.down_proj.weight"),
        down_bias=read(f"{mlp}.down_proj.bias") if config.mlp_bias else None,
    )
