"""The operators in the place of the reference: the same bits, from two bits a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel.engine.ternary import OperatorMatrix, place_on
from onekernel.models.model import Model
from onekernel.models.registry import model_config
from onekernel.models.ternary import Place, load_ternary
from onekernel.phases.ternary import TernaryReference
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.matrix import TernaryMatrix
from tests import ternary_models as models
from tests.ternary_models import BITNET, LLAMA, QWEN
from tests.unit.models.test_ternary import logits


def load(source: Path, place: Place) -> Model:
    checkpoint = open_checkpoint(str(source))
    config = model_config(checkpoint.settings.config)
    weights = load_ternary(
        checkpoint, config, dtype=torch.float32, device="cpu", progress=lambda done, total: None, place=place
    )
    return Model(config, weights)


@pytest.mark.parametrize("config", [BITNET, LLAMA, QWEN], ids=["bitnet", "llama", "qwen"])
def test_a_model_on_operators_has_the_reference_s_logits_bit_by_bit(config: dict[str, object], tmp_path: Path) -> None:
    models.write_packed(tmp_path, models.make(config))
    tokens = list(range(5, 22))
    packed, plain = load(tmp_path, OperatorMatrix.pack), load(tmp_path, TernaryReference)
    assert torch.equal(logits(packed, tokens, (12, 1, 4)), logits(plain, tokens, (12, 1, 4)))


@pytest.mark.parametrize("group", [None, 64, 128])
def test_rows_are_those_of_the_matrix(group: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-1, 2, (70, 256), generator=draw, dtype=torch.int8)
    scales = torch.rand((2,) if group is None else (70, 256 // group), generator=draw) + 0.5
    matrix = TernaryMatrix(codes, scales, (30, 40) if group is None else (), group)
    ids = torch.tensor([69, 0, 29, 30, 0, 15, 16])
    for placed in (OperatorMatrix.pack(matrix), TernaryReference(matrix)):
        assert torch.equal(placed[ids], matrix.dequantised()[ids])


def test_a_gpu_gets_packed_weights_and_a_cpu_codes() -> None:
    matrix = TernaryMatrix(torch.ones(32, 128, dtype=torch.int8), torch.ones(1))
    assert place_on("cuda:0") == OperatorMatrix.pack
    assert place_on("cpu") is TernaryReference
    assert OperatorMatrix.pack(matrix).packed.codes.nbytes == 32 * 128 // 4
