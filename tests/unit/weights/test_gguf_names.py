"""A GGUF's metadata as a config, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.layout import check_tensors
from tests.unit.weights.gguf_files import write_gguf, write_tiny


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none"}, {"kind": "default"}),
    ],
)
def test_rope_scaling_in_the_metadata(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    scaling = model_config(GgufCheckpoint(write_tiny(tmp_path, changes)).settings.config).rope_scaling
    assert {name: getattr(scaling, name) for name in expected} == expected


def test_yarn_in_the_metadata_is_refused(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_tiny(tmp_path, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}))
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        model_config(checkpoint.settings.config)


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = model_config(GgufCheckpoint(write_tiny(tmp_path, {"attention.sliding_window": 32})).settings.config)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 32)


def test_ends_and_sampling_values_come_from_the_metadata(tmp_path: Path) -> None:
    path = write_tiny(
        tmp_path,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=7,
        tokenizer__ggml__eot_token_id=5,
        general__sampling__temp=0.5,
        general__sampling__top_k=20,
    )
    settings = GgufCheckpoint(path).settings
    assert (settings.config["bos_token_id"], settings.config["eos_token_id"]) == (1, 7)
    expected = {"eos_token_id": [5, 7], "temperature": 0.5, "top_k": 20, "do_sample": True}
    assert settings.generation_config == expected


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = write_tiny(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(f"llama.{key}".encode(), f"xlama.{key}".encode()))
    with pytest.raises(ModelError, match=f"the metadata of .*tiny.gguf has no llama.{key}"):
        GgufCheckpoint(path)


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor token_embd\.weight"):
        GgufCheckpoint(write_gguf(tmp_path / "vocab.gguf", {}))


def test_an_unknown_tensor_keeps_its_name_and_is_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(
        write_tiny(tmp_path, raw={"blk.0.attn_sinks.weight": (np.ones(4, np.float32), Type.F32)})
    )
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight of shape"):
        check_tensors(model_config(checkpoint.settings.config), checkpoint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"changes": {"expert_count": 8}}, "mixture of 8 experts"),
        ({"general__type": "adapter"}, "of type 'adapter', not a model"),
        ({"general__type": "mmproj"}, "of type 'mmproj'"),
        ({"split__count": 3, "split__no": 0}, "one of 3 parts; .* llama-gguf-split --merge"),
        ({"endianess": gguf.GGUFEndian.BIG}, "big-endian GGUF"),
        ({"raw": {"x": (np.zeros((2, 84), np.uint8), Type.Q2_K)}}, "tensors of type Q2_K, .* use a GGUF with F32,"),
        ({"raw": {"x": (np.zeros((2, 18), np.uint8), Type.IQ4_NL)}}, "type IQ4_NL"),
        ({"raw": {"x": (np.zeros((2, 136), np.uint8), Type.IQ4_XS)}}, "type IQ4_XS"),
        ({"changes": {"rope.dimension_count": 8}}, "rope.dimension_count = 8 but heads of 16"),
        ({"changes": {"attention.value_length": 32}}, "value_length = 32 but heads of 16"),
    ],
)
def test_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        GgufCheckpoint(write_tiny(tmp_path, **options))


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"architecture 'gemma2', .* known are llama, qwen2, qwen3, bitnet, bitnet-b1.58: use",
    ):
        GgufCheckpoint(write_gguf(tmp_path / "gemma.gguf", {}, "gemma2"))
