"""Converted models are the same models: every code and scale, and the dense tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from onekernel.cli.main import main
from onekernel.config import ModelConfig, Ternary
from onekernel.errors import ModelError
from onekernel.models.registry import model_config
from onekernel.weights.architectures.bitnet_b158 import SUB_NORMS
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.checkpoint import HEAD, TernaryCheckpoint
from onekernel.weights.ternary.int8_rows import quantise_rows
from onekernel.weights.ternary.write import write_ternary
from tests import ternary_models as models
from tests.ternary_models import BITNET, FIRST, LLAMA, QWEN
from tests.unit.models.test_ternary import load, logits

FLAGS = ["--group", "128", "--head", "ternary"]


def opened(source: Path, **changes: Any) -> tuple[TernaryCheckpoint, ModelConfig]:
    checkpoint = open_checkpoint(str(source))
    config = replace(model_config(checkpoint.settings.config), **changes)
    return TernaryCheckpoint(checkpoint, config), config


def same(first: Path, second: Path, **changes: Any) -> None:
    (one, config), (other, found) = opened(first, **changes), opened(second)
    assert found == config
    assert one.tensors.keys() == other.tensors.keys()
    if config.ternary is not None and config.ternary.head == "int8":
        assert all(torch.equal(*pair) for pair in zip(one.int8_head(), other.int8_head(), strict=True))
    for name in one.tensors.keys() - {HEAD}:
        if not one.is_ternary(name):
            assert torch.equal(one.read(name), other.read(name))
            continue
        before, after = one.ternary(name), other.ternary(name)
        assert torch.equal(before.codes, after.codes)
        assert torch.equal(before.scales, after.scales)


@pytest.mark.parametrize("kind", ["multiply", "divide", "masters", "other names", "groups"])
def test_a_converted_model_is_the_same(kind: str, tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "made" / "here"
    source.mkdir()
    if kind in ("masters", "other names"):
        names = {theirs: ours for ours, theirs in SUB_NORMS.items()}
        config = FIRST if kind == "other names" else BITNET | {"torch_dtype": "bfloat16"}
        models.write_masters(source, models.make(config), names if kind == "other names" else None)
    else:
        models.write_packed(source, models.make({"multiply": BITNET, "divide": LLAMA, "groups": QWEN}[kind]))
    (source / "tokenizer.json").write_text("{}")
    assert main(["convert", str(source), str(written), "--ternary"]) == 0
    same(source, written)
    assert (written / "tokenizer.json").read_text() == "{}"
    with safe_open(written / "model.safetensors", framework="pt") as file:
        assert file.metadata()["onekernel.format"] == "ternary-1"
        assert file.metadata()["onekernel.source"] == "source"


def test_expanded_weights_of_a_dense_config_become_groups_again(tmp_path: Path) -> None:
    """Ternary models are also published expanded, with a config that does not say that they are ternary."""
    numbers = models.make(QWEN)
    dense = {key: value for key, value in QWEN.items() if key != "quantization_config"}
    source = tmp_path / "source"
    source.mkdir()
    models.write_expanded(source, replace(numbers, config=dense))
    assert model_config(open_checkpoint(str(source)).settings.config).ternary is None
    assert main(["convert", str(source), str(tmp_path / "made"), "--ternary", *FLAGS]) == 0
    view, config = opened(tmp_path / "made")
    assert config.ternary == Ternary(128, "ternary")
    for name in numbers.codes:
        matrix = view.ternary(name)
        assert torch.equal(matrix.codes, torch.from_numpy(numbers.codes[name]))
        assert torch.equal(matrix.scales, torch.from_numpy(numbers.scales[name]))


@pytest.mark.parametrize("config", [BITNET, LLAMA], ids=["tied", "untied"])
def test_an_int8_head_is_near_the_dense_one_and_survives_another_conversion(
    config: dict[str, Any], tmp_path: Path
) -> None:
    source, made, again = tmp_path / "source", tmp_path / "made", tmp_path / "again"
    source.mkdir()
    models.write_packed(source, models.make(config))
    assert main(["convert", str(source), str(made), "--ternary", "--head", "int8"]) == 0
    assert main(["convert", str(made), str(again), "--ternary"]) == 0
    same(made, again)
    tokens = list(range(40, 60))
    want, got = (logits(load(folder), tokens, (20,)) for folder in (source, made))
    assert 0 < (got - want).norm() < 1e-2 * want.norm()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.9
    assert json.loads((made / "config.json").read_text())["quantization_config"]["head"] == "int8"


def test_a_model_without_a_tokenizer_is_converted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write_packed(tmp_path, models.make(BITNET))
    said = []
    for made in (tmp_path / "without", tmp_path / "with"):
        assert main(["convert", str(tmp_path), str(made), "--ternary"]) == 0
        said.append(capsys.readouterr().err)
        (tmp_path / "tokenizer.json").write_text("{}")
    assert [f"{tmp_path} has no tokenizer.json" in lines for lines in said] == [True, False]


def test_rows_of_int8_are_within_half_a_step() -> None:
    weight = torch.randn(50, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None]
    weight[7] = 0
    values, scales = quantise_rows(weight)
    assert int(values.abs().max()) == 127
    assert ((values * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()
    assert (values[7] == 0).all()


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = models.make(BITNET)
    models.write_packed(tmp_path, numbers)
    assert main(["convert", str(tmp_path), str(tmp_path), "--ternary"]) == 2
    assert "holds a model.safetensors" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "--ternary" in capsys.readouterr().err
    file = models.write_gguf(tmp_path / "m.gguf", numbers, "I2_S", "bitnet-b1.58")
    assert main(["convert", str(file), str(tmp_path / "x"), "--ternary"]) == 1
    assert "is neither a directory nor a hub id" in capsys.readouterr().err
    for missing in ("/no/such/model", "SmolLM2-135M", "~nobody-at-all/model"):
        assert main(["convert", missing, str(tmp_path / "x"), "--ternary"]) == 1
        error = capsys.readouterr().err
        assert f"{missing!r} is neither a directory nor a hub id" in error and "--" not in error
    assert main(["convert", str(tmp_path), str(file), "--ternary"]) == 2
    assert "is a file; give a directory" in capsys.readouterr().err
    checkpoint = open_checkpoint(str(tmp_path))
    config = model_config(checkpoint.settings.config)
    with pytest.raises(ModelError, match="no Hugging Face directory"):
        write_ternary(checkpoint, replace(config, ternary=None), tmp_path / "x")
    (tmp_path / "qwen").mkdir()
    models.write_packed(tmp_path / "qwen", models.make(QWEN))
    assert main(["convert", str(tmp_path / "qwen"), str(tmp_path / "x"), "--ternary", "--head", "int8"]) == 2
    assert "the head is ternary already; one of another kind is made of a dense one" in capsys.readouterr().err
