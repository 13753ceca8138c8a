"""Named tensors -> a model's weights on a device, one copy, one tensor in flight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onekernel.config import ModelConfig
from onekernel.models.model import LayerWeights, ModelWeights
from onekernel.models.packed import PackedModel, allocate, pack_embedding, pack_final_norm, pack_layer, pack_matrix
from onekernel.models.registry import check_tensors
from onekernel.phases.linear import Weight
from onekernel.weights.arena import WeightLayout
from onekernel.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Reader:
    """Reads tensors to the device in the wanted dtype and counts them for the progress bar."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: str, progress: Progress
    ) -> None:
        check_tensors(config, checkpoint)
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.done, self.progress = 0, progress
        self.total = sum(1 for name in checkpoint.tensors if "rotary_emb" not in name)

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one tensor on the device, in the model's dtype or another."""
        tensor = self.checkpoint.read(name).to(device=self.device, dtype=dtype or self.dtype)
        self.count(1)
        return tensor.contiguous()

    def count(self, tensors: int) -> None:
        """Say that so many tensors were read."""
        self.done += tensors
        self.progress(self.done, self.total)

    def matrix(self, names: tuple[str, ...]) -> torch.Tensor:
        """Return one tensor, or several stacked."""
        return self(names[0]) if len(names) == 1 else self.stacked(names)

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
    read = Reader(checkpoint, config, dtype, device, progress)
    embedding = read(EMBEDDING)
    layers = tuple(read_layer(read, config, index, read.matrix) for index in range(config.num_hidden_layers))
    final_norm = read(FINAL_NORM, torch.float32)
    head = embedding if config.tie_word_embeddings else read(HEAD)
    read.end()
    return ModelWeights(embedding, layers, final_norm, head)


def load_packed(
    checkpoint: Checkpoint, config: ModelConfig, layout: WeightLayout, *, device: str, progress: Progress
) -> PackedModel:
    """Read every tensor of the checkpoint straight into the packed form on `device`, a layer at a time.

    See `load_weights` for `progress` and errors.
    """
    read = Reader(checkpoint, config, torch.bfloat16, device, progress)
    packed = allocate(config, layout, device)
    pack_embedding(packed, read(EMBEDDING))
    for index in range(config.num_hidden_layers):
        pack_layer(packed, index, read_layer(read, config, index, read.matrix))
    pack_final_norm(packed, read(FINAL_NORM, torch.float32))
    if not config.tie_word_embeddings:
        pack_matrix(packed, "head", 0, read(HEAD))
    read.end()
    return packed


def read_layer(
    read: Reader, config: ModelConfig, index: int, matrix: Callable[[tuple[str, ...]], Weight]
) -> LayerWeights:
    """Read one layer; `matrix` reads the tensors of projections that are fused to one."""
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"

    def names(prefix: str, parts: tuple[str, ...], kind: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{part}.{kind}" for part in parts)

    def norm(name: str, there: bool) -> torch.Tensor | None:
        return read(f"{name}.weight", torch.float32) if there else None

    def bias(prefix: str, parts: tuple[str, ...], there: bool) -> torch.Tensor | None:
        return read.matrix(names(prefix, parts, "bias")) if there else None

    qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    return LayerWeights(
        attention_norm=read(f"model.layers.{index}.input_layernorm.weight", torch.float32),
        qkv=matrix(names(attention, qkv, "weight")),
        qkv_bias=bias(attention, qkv, config.qkv_bias),
        q_norm=norm(f"{attention}.q_norm", config.qk_norm),
        k_norm=norm(f"{attention}.k_norm", config.qk_norm),
        out=matrix(names(attention, ("o_proj",), "weight")),
        out_bias=bias(attention, ("o_proj",), config.o_bias),
        mlp_norm=read(f"model.layers.{index}.post_attention_layernorm.weight", torch.float32),
        gate_up=matrix(names(mlp, gate_up, "weight")),
        gate_up_bias=bias(mlp, gate_up, config.mlp_bias),
        down=matrix(names(mlp, ("down_proj",), "weight")),
        down_bias=bias(mlp, ("down_proj",), config.mlp_bias),
        attention_sub_norm=norm(f"{attention}.attn_sub_norm", config.sub_norms),
        mlp_sub_norm=norm(f"{mlp}.ffn_sub_norm", config.sub_norms),
    )
