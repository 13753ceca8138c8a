"""Converted checkpoints of the published engine that are damaged, foreign or of another shape."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.errors import ModelError
from onekernel.models.registry import check_tensors, model_config
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.checkpoint import TernaryCheckpoint
from tests import ternary_models as models
from tests.ternary_models import BITNET

SMALL = BITNET | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


WO = "layers.0.attention.wo.weight"
SCALE = WO + "_scale"


def test_every_tensor_is_there_and_fused_projections_have_their_own_scales(tmp_path: Path) -> None:
    numbers = models.make(SMALL)
    checkpoint = open_checkpoint(str(models.write_published(tmp_path, numbers)))
    config = model_config(checkpoint.settings.config)
    view = TernaryCheckpoint(checkpoint, config)
    check_tensors(config, view)
    for name in numbers.codes:
        matrix = view.ternary(name)
        assert torch.equal(matrix.codes, torch.from_numpy(numbers.codes[name]))
        assert matrix.scales.item() == numbers.scales[name].item()
        rows = list(range(0, matrix.shape[0], 5))
        assert (view.oracle_rows(name, rows) == numbers.values(name)[rows]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("norm.weight"), "lacks norm.weight"),
        (lambda state: state.pop("layers.0.attention.wo.weight_scale"), "lacks layers.0.attention.wo.weight or its"),
        (
            lambda state: state.update({"layers.0.attention.wqkv.weight": torch.ones(96, 16).char()}),
            "has 96 rows; .* 128",
        ),
        (lambda state: state.update({"step": 3}), "no dictionary of tensors"),
        (lambda state: state.update({WO: torch.ones(64, 16).to_sparse()}), "no dictionary of tensors"),
        (lambda state: state.update({WO: torch.ones(64, 16, device="meta").char()}), "no dictionary of tensors"),
        (
            lambda state: state.update({WO: torch.tensor(1).char()}),
            r"wo.weight in .* torch.int8 of shape \(\); .*64, K",
        ),
        (lambda state: state.update({WO: torch.ones(64).char()}), r"wo.weight in .* of shape \(64,\)"),
        (lambda state: state.update({WO: torch.ones(64, 16)}), r"wo.weight in .* is torch.float32"),
        (lambda state: state.update({SCALE: torch.tensor(1.0)}), r"wo.weight_scale in .* of shape \(\); .* 1 or more"),
        (lambda state: state.update({SCALE: torch.ones(0)}), r"wo.weight_scale in .* of shape \(0,\)"),
        (lambda state: state.update({SCALE: torch.ones(4).int()}), r"wo.weight_scale in .* is torch.int32"),
        (lambda state: state[SCALE].fill_(float("nan")), r"wo.weight_scale in .* has a scale of nan"),
        (lambda state: state[SCALE].fill_(-2), r"wo.weight_scale in .* has a scale of -2"),
    ],
)
def test_what_is_not_whole_is_refused(change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path) -> None:
    models.write_published(tmp_path, models.make(SMALL))
    state = torch.load(tmp_path / "model_state_int2.pt")
    change(state)
    torch.save(state, tmp_path / "model_state_int2.pt")
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(tmp_path))


def test_another_packing_under_the_same_name_is_refused(tmp_path: Path) -> None:
    models.write_published(tmp_path, models.make(SMALL))
    state = torch.load(tmp_path / "model_state_int2.pt")
    state["layers.0.attention.wo.weight"] = state["layers.0.attention.wo.weight"] - 0x55  # codes from 0
    torch.save(state, tmp_path / "model_state_int2.pt")
    checkpoint = open_checkpoint(str(tmp_path))
    view = TernaryCheckpoint(checkpoint, model_config(checkpoint.settings.config))
    with pytest.raises(ModelError, match="code 0 in published codes"):
        view.ternary("model.layers.0.self_attn.o_proj.weight")


def test_a_damaged_file_is_an_error_of_the_package(tmp_path: Path) -> None:
    """Whatever PyTorch raises; damage that it does not see may leave a sound file."""
    models.write_published(tmp_path, models.make(SMALL))
    path = tmp_path / "model_state_int2.pt"
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(5):
            damaged[draw.randrange(3000)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(str(tmp_path))
        except ModelError:
            refused += 1
    assert refused > 30


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models.write_config(tmp_path, SMALL)
    torch.save({"norm.weight": Harmful()}, tmp_path / "model_state_int2.pt")
    with pytest.raises(ModelError, match="cannot be read as tensors alone"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model_state_int2.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ModelError, match="cannot be read as tensors alone"):
        open_checkpoint(str(tmp_path))
    assert not (tmp_path / "harm").exists()
