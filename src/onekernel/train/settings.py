"""What a training run is told: the sections and keys of its TOML file, with their defaults and limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from onekernel.config import ModelConfig
from onekernel.errors import ConfigError
from onekernel.train.toml_file import convert, read_toml

Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrNever = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`start` continues an existing model (directory, GGUF file or hub id); else the dimensions of a new Llama."""

    start: str | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10000.0
    tie_word_embeddings: bool = True
    hidden_act: Literal["relu", "relu2", "silu"] | None = None
    """None: relu for a new model, the checkpoint's own for an existing one."""


class DataSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text: files (plain or .parquet), folders of them, and folders that Hugging Face's save_to_disk wrote."""

    train: Annotated[list[str], msgspec.Meta(min_length=1)]
    held_out: list[str] = []
    """Text to measure on; none: the last `held_out_share` of the training text."""
    held_out_share: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.05
    column: str = "text"
    """The column of parquet files and data sets."""
    context: Annotated[int, msgspec.Meta(ge=2)] = 1024
    """Tokens of a training piece."""


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`directory` with a tokenizer.json, else a byte-level BPE trained on the text; `start` brings its own."""

    directory: str | None = None
    vocab_size: Annotated[int, msgspec.Meta(ge=257)] = 16384
    train_bytes: Count = 20_000_000
    """Text that the vocabulary is trained on, from its beginning."""


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW; the learning rate rises linearly over `warm_up` steps and falls to `final_share` of itself."""

    learning_rate: Positive = 1e-3
    warm_up: CountOrNever = 600
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    """Largest norm of the gradient."""


class SparsitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The L1 penalty: l1 x mean over layers of (sum over neurons of |h|, mean over tokens), h = relu(gate) * up."""

    l1: NotNegative = 2e-5
    l1_warm_up: CountOrNever = 0
    """Steps over which the coefficient rises linearly from 0."""
    renoise: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share by which the gates of dead neurons move towards noise after each step (published: 0.1); 0: they stay."""
    route: Literal["auto", "dense", "sparse"] = "auto"
    """How feed-forwards are computed, always exactly. auto: on a GPU the fastest for what was counted, else dense."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, how much at once, where, and what is written when. Steps are optimiser steps."""

    directory: str
    steps: Count
    batch: Count = 32
    """Pieces of a step, over all processes."""
    micro_batch: Count | None = None
    """Pieces that a process computes at once; None: its whole part of the batch."""
    seed: CountOrNever = 0
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the products; weights and optimiser stay float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    deterministic: bool = True
    """On a GPU: the same bits every time, also where PyTorch has a faster way (attention's backward)."""
    compile: bool = False
    recompute: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    log_every: Count = 10
    evaluate_every: CountOrNever = 500
    """0: only at the end."""
    evaluate_pieces: Count = 256
    """Held-out pieces at most."""
    checkpoint_every: CountOrNever = 500
    """0: only when interrupted."""
    picture: bool | None = None
    """progress.png; None: if matplotlib is there."""
    tensorboard: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one run."""

    run: RunSettings
    data: DataSettings
    model: ModelSettings = ModelSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    sparsity: SparsitySettings = SparsitySettings()

    def __post_init__(self) -> None:
        _check_model(self.model)
        if self.model.start is not None and self.tokenizer.directory is not None:
            raise ConfigError("tokenizer.directory and model.start are both given; a model keeps its own tokenizer")

    def fixed(self) -> dict[str, Any]:
        """Return what a resumed run may not change, because it would be another run."""
        kept = {name: msgspec.to_builtins(getattr(self, name)) for name in ("model", "data", "tokenizer")}
        return kept | {"run": {"batch": self.run.batch, "seed": self.run.seed}}


_DIMENSIONS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _check_model(model: ModelSettings) -> None:
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    if model.start is not None:
        if given := [name for name in (*_DIMENSIONS, *optional) if getattr(model, name) is not None]:
            raise ConfigError(f"model.start brings its own dimensions; leave out model.{', model.'.join(given)}")
    elif missing := [name for name in _DIMENSIONS if getattr(model, name) is None]:
        raise ConfigError(f"model.{missing[0]} is missing; give the dimensions of a new model, or model.start")


def read_settings(path: Path) -> Settings:
    """Read a run's TOML file; raises ConfigError naming the file, the key, what was found and what it must be."""
    return read_toml(path, Settings)


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Return settings from nested mappings, as a TOML file has them; raises ConfigError like `read_settings`."""
    return convert(values, Settings)


def new_model(settings: Settings, vocab_size: int) -> ModelConfig:
    """Return the dimensions of a new model; raises ConfigError if they contradict each other."""
    model, context = settings.model, settings.data.context
    hidden, heads = model.hidden_size or 0, model.num_attention_heads or 0
    head_dim = model.head_dim
    if head_dim is None:
        head_dim, rest = divmod(hidden, heads)
        if rest:
            raise ConfigError(
                f"model.hidden_size is {hidden}, not a multiple of model.num_attention_heads, {heads}; "
                "change one of them, or give model.head_dim"
            )
    positions = model.max_position_embeddings or context
    if positions < context:
        raise ConfigError(f"data.context is {context} and model.max_position_embeddings {positions}; raise the latter")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        intermediate_size=model.intermediate_size or 0,
        num_hidden_layers=model.num_hidden_layers or 0,
        num_attention_heads=heads,
        num_key_value_heads=model.num_key_value_heads or heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        rms_norm_eps=model.rms_norm_eps,
        rope_theta=model.rope_theta,
        hidden_act=model.hidden_act or "relu",
        tie_word_embeddings=model.tie_word_embeddings,
    )
