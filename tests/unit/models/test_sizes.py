"""Bytes that are promised before loading are those that the loaded weights have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.cli.main import main
from onekernel.config import ModelConfig
from onekernel.engine.ternary import OperatorMatrix
from onekernel.models.registry import model_config
from onekernel.models.sizes import bytes_read_per_token, weight_bytes
from onekernel.models.ternary import Place, TernaryWeights, load_ternary
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.open import open_checkpoint
from tests import ternary_models as models
from tests.ternary_models import BITNET, LLAMA, QWEN


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in what a model holds, once."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, TernaryReference):
        yield from (value.matrix.codes, value.matrix.scales)
    elif isinstance(value, OperatorMatrix):
        yield from (value.packed.codes, value.packed.scales)
    elif isinstance(value, Int8Rows):
        yield from (value.values, value.scales)


def held(weights: TernaryWeights) -> int:
    parts: list[Any] = [weights.embedding, weights.final_norm, weights.head]
    for layer in weights.layers:
        parts += [getattr(layer, name) for name in layer.__slots__]
    found = {tensor.data_ptr(): tensor.nbytes for part in parts for tensor in tensors(part)}
    return sum(found.values())


def load(source: Path, place: Place) -> tuple[TernaryWeights, ModelConfig]:
    checkpoint = open_checkpoint(str(source))
    config = model_config(checkpoint.settings.config)
    weights = load_ternary(
        checkpoint, config, dtype=torch.bfloat16, device="cpu", progress=lambda done, total: None, place=place
    )
    return weights, config


@pytest.mark.parametrize("kind", ["bitnet", "llama", "qwen", "int8 head"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_memory_is_what_was_promised(kind: str, device: str, tmp_path: Path) -> None:
    """Scales of a CPU's fused projections are one each, not one a row: the promise is a little more."""
    config = {"llama": LLAMA, "qwen": QWEN}.get(kind, BITNET)
    source = tmp_path / "source"
    source.mkdir()
    models.write_packed(source, models.make(config))
    if kind == "int8 head":
        assert main(["convert", str(source), str(tmp_path / "made"), "--ternary", "--head", "int8"]) == 0
        source = tmp_path / "made"
    weights, found = load(source, OperatorMatrix.pack if device != "cpu" else TernaryReference)
    promised = weight_bytes(found, 2, device)
    assert 0.96 * promised < held(weights) <= promised
    read = bytes_read_per_token(found, 2, device)
    embedding = 2 * found.vocab_size * found.hidden_size
    table = embedding if kind in ("llama", "int8 head") else 0  # read row by row, beside the head
    assert read == pytest.approx(promised - table, rel=0.01)
