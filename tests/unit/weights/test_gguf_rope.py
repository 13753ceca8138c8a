"""Llama 3's RoPE divisors in a GGUF, made by transformers' own formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from onekernel.errors import UnsupportedModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.layout import check_tensors
from tests.unit.weights.gguf_files import write_tiny
from tests.unit.weights.tiny import CONFIG


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    hf = LlamaConfig(
        **CONFIG | {"rope_parameters": scaling | {"rope_type": "llama3"}, "max_position_embeddings": 131072}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    divisors = (plain / scaled.double()).to(torch.float32)
    assert 1 < float(divisors[5]) < factor  # one in the smooth part
    path = write_tiny(tmp_path, {"rope.freq_base": 5e5}, raw={"rope_freqs.weight": (divisors.numpy(), Type.F32)})
    checkpoint = GgufCheckpoint(path)
    read = model_config(checkpoint.settings.config).rope_scaling
    assert (read.kind, read.factor, read.original_max_position_embeddings) == ("llama3", factor, 8192)
    check_tensors(model_config(checkpoint.settings.config), checkpoint)


def test_rope_divisors_of_one_change_nothing(tmp_path: Path) -> None:
    ones = np.ones(8, dtype=np.float32)
    checkpoint = GgufCheckpoint(write_tiny(tmp_path, raw={"rope_freqs.weight": (ones, Type.F32)}))
    assert model_config(checkpoint.settings.config).rope_scaling.kind == "default"
    assert "rope_freqs.weight" not in checkpoint.tensors


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 8), np.full(8, 8.0), np.array([1.0, 8.0])])
def test_other_rope_divisors_are_refused(tmp_path: Path, divisors: Any) -> None:
    path = write_tiny(tmp_path, raw={"rope_freqs.weight": (divisors.astype(np.float32), Type.F32)})
    with pytest.raises(UnsupportedModelError, match=r"divisors up to 8\.0 that are not Llama 3's; use the saf"):
        GgufCheckpoint(path)
