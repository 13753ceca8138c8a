"""A packing or scales read wrongly must not load: one block is compared with an oracle (complaint L6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.errors import ModelError
from onekernel.models.registry import model_config
from onekernel.models.ternary import PlacedMatrix, load_ternary
from onekernel.phases.ternary import TernaryReference
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.matrix import TernaryMatrix
from tests import ternary_models as models
from tests.ternary_models import BITNET, LLAMA, QWEN


def load(source: Path, place: type[TernaryReference] | None = None) -> None:
    checkpoint = open_checkpoint(str(source))
    config = model_config(checkpoint.settings.config)
    load_ternary(
        checkpoint,
        config,
        dtype=torch.float32,
        device="cpu",
        progress=lambda done, total: None,
        place=place or TernaryReference,
    )


@pytest.mark.complaint(
    "L6",
    file="weights/ternary/checkpoint.py",
    old='scales = 1 / scales if self.convention == "divide" else scales',
    new='scales = 1 / scales if self.convention == "multiply" else scales',
)
@pytest.mark.complaint(
    "L6",
    file="weights/ternary/hf_packed.py",
    old="torch.bitwise_and(packed >> 2 * pair, 3, out=part)",
    new="torch.bitwise_and(packed >> 6 - 2 * pair, 3, out=part)",
)
@pytest.mark.complaint(
    "L6",
    file="weights/ternary/fused.py",
    old="scales = torch.cat([matrix.scales for matrix in matrices])",
    new="scales = torch.cat([matrix.scales for matrix in reversed(matrices)])",
)
@pytest.mark.parametrize("config", [BITNET, LLAMA, QWEN], ids=["multiply", "divide", "groups"])
def test_what_is_read_is_what_the_format_says(config: dict[str, object], tmp_path: Path) -> None:
    load(models.write_packed(tmp_path, models.make(config)))


class Wrong(TernaryReference):
    """What a faulty kernel or reader would make."""

    def __init__(self, matrix: TernaryMatrix) -> None:
        super().__init__(self.changed(matrix))

    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        return matrix


class Inverse(Wrong):
    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        return TernaryMatrix(matrix.codes, 1 / matrix.scales, matrix.rows if matrix.group is None else (), matrix.group)


class EqualShares(Wrong):
    """The published engine gives fused rows their scales as if all projections had equally many (BitNet#316)."""

    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        shares = len(matrix.rows)
        if shares != 3:
            return matrix
        third = matrix.shape[0] // shares
        return TernaryMatrix(matrix.codes, matrix.scales, (third, third, matrix.shape[0] - 2 * third))


class Shuffled(Wrong):
    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        codes = matrix.codes.unflatten(1, (-1, 4)).flip(2).flatten(1)
        return TernaryMatrix(codes, matrix.scales, matrix.rows if matrix.group is None else (), matrix.group)


class NoNumber(Wrong):
    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        scales = torch.full_like(matrix.scales, float("nan"))
        return TernaryMatrix(matrix.codes, scales, matrix.rows if matrix.group is None else (), matrix.group)


class OneValue(Wrong):
    @staticmethod
    def changed(matrix: TernaryMatrix) -> TernaryMatrix:
        codes = matrix.codes.clone()
        codes[-1, 17] = 1 if codes[-1, 17] < 1 else -1
        return TernaryMatrix(codes, matrix.scales, matrix.rows if matrix.group is None else (), matrix.group)


@pytest.mark.complaint(
    "L6", file="weights/ternary/verify.py", old="if wrong.any():", new="if wrong.all() and wrong.size == 0:"
)
@pytest.mark.parametrize("wrong", [Inverse, EqualShares, Shuffled, NoNumber, OneValue])
def test_wrong_products_are_refused(wrong: type[Wrong], tmp_path: Path) -> None:
    source = models.write_packed(tmp_path, models.make(BITNET))
    with pytest.raises(
        ModelError, match=r"model.layers.0.self_attn.\w_proj.weight .* does not multiply as its file says"
    ):
        load(source, wrong)


@pytest.mark.complaint(
    "L6", file="weights/ternary/verify.py", old="low < inverted < high:", new="low < inverted < high < 0:"
)
@pytest.mark.parametrize("config", [BITNET, LLAMA], ids=["multiply", "divide"])
def test_the_other_convention_in_the_config_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """With scales as trained models have them, 0.02 or so; where they are near 1 the two hardly differ."""
    numbers = models.make(config)
    scales = {name: (scale / 8).astype("float32") for name, scale in numbers.scales.items()}
    models.write_packed(tmp_path, models.with_scales(numbers, scales))
    load(tmp_path)
    turned = {"autobitlinear": "bitlinear"}.get(config["quantization_config"].get("linear_class"), "autobitlinear")
    models.write_config(
        tmp_path, config | {"quantization_config": config["quantization_config"] | {"linear_class": turned}}
    )
    with pytest.raises(ModelError, match=r"linear_class is wrong: \"(auto)?bitlinear\" it must be"):
        load(tmp_path)


def test_masters_near_a_threshold_do_not_matter(tmp_path: Path) -> None:
    """Float32 may round them either way; a whole column of them is left out of the comparison."""
    config = BITNET | {"torch_dtype": "float32"}
    models.write_masters(tmp_path, models.make(config))
    from safetensors.torch import load_file, save_file

    saved = load_file(tmp_path / "model.safetensors")
    weight = saved["model.layers.0.self_attn.q_proj.weight"]
    weight[:, 3] = weight.double().abs().mean().float() / 2
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)


def test_a_place_takes_any_matrix() -> None:
    placed: PlacedMatrix = TernaryReference(TernaryMatrix(torch.ones(4, 8, dtype=torch.int8), torch.ones(1)))
    assert placed.linear(torch.ones(1, 8)).tolist() == [[8.0] * 4]
