"""Hugging Face directories: whole ones, damaged ones, and ones of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import read_all
from onekernel.weights.layout import check_tensors
from onekernel.weights.open import open_checkpoint
from tests.unit.weights.tiny import CONFIG, tensors, write_config, write_model, write_sharded

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("write", [write_model, write_sharded])
def test_reads_what_was_written(tmp_path: Path, write: Callable[[Path], dict[str, torch.Tensor]]) -> None:
    saved = write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    checkpoint = open_checkpoint(str(tmp_path))
    check_tensors(model_config(checkpoint.settings.config), checkpoint)
    found = dict(read_all(checkpoint))
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, saved[name])
        info = checkpoint.tensors[name]
        assert (info.shape, info.stored_type) == (tuple(tensor.shape), "BF16")
        assert info.stored_bytes == tensor.nbytes
    assert checkpoint.settings.name == tmp_path.name
    assert checkpoint.settings.config == CONFIG
    assert checkpoint.settings.generation_config == {"eos_token_id": [2, 3]}
    assert checkpoint.settings.tokenizer.directory == tmp_path
    checkpoint.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_types_come_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    write_config(tmp_path)
    saved = tensors(CONFIG, dtype)
    save_file(saved, tmp_path / WEIGHTS)
    checkpoint = open_checkpoint(str(tmp_path))
    read = checkpoint.read("model.norm.weight")
    assert read.dtype == dtype
    assert torch.equal(read, saved["model.norm.weight"])
    assert checkpoint.tensors["model.norm.weight"].stored_bytes == read.nbytes


def test_fp8_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, tmp_path / WEIGHTS)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.tensors["model.norm.weight"].stored_bytes == 64
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight in .* stored as F8_E4M3"):
        checkpoint.read("model.norm.weight")


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_in_header(data: bytes) -> bytes:
    return data[:60]


def empty(data: bytes) -> bytes:
    return b""


def huge_header(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


def broken_json(data: bytes) -> bytes:
    return data[:9] + b"!" + data[10:]


def other_offsets(data: bytes) -> bytes:
    return data.replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1)


def pickle(data: bytes) -> bytes:
    return b"\x80\x02}q\x00." * 20


@pytest.mark.parametrize("damage", [cut, cut_in_header, empty, huge_header, broken_json, other_offsets, pickle])
@pytest.mark.parametrize("write", [write_model, write_sharded])
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], write: Callable[[Path], object]
) -> None:
    write(tmp_path)
    path = next(path for path in (tmp_path / WEIGHTS, tmp_path / SECOND) if path.exists())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=rf"{path.name} is not a whole safetensors file .*: fetch it again"):
        open_checkpoint(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / SECOND).unlink()
    with pytest.raises(ModelError, match=f"lacks {SECOND}, listed in {INDEX}"):
        open_checkpoint(str(tmp_path))


def test_a_shard_of_another_model_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / SECOND)
    with pytest.raises(ModelError, match=rf"{SECOND} lacks .*, listed in {INDEX}|is in both"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    saved = write_sharded(tmp_path)
    save_file(saved, tmp_path / SECOND)
    with pytest.raises(ModelError, match="is in both"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=f"{INDEX} has no weight_map"):
        open_checkpoint(str(tmp_path))


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match=r"'../secret.safetensors'; shards must lie beside the index"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not valid JSON"), ("[]", "holds list, not a JSON object"), ('{"a": "\udc80"}', "is not valid JSON")],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_settings_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=f"{name} {words}"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "only in pickled files .pytorch_model.bin"),
        (["config.json", "consolidated.safetensors"], UnsupportedModelError, "but consolidated.safetensors, which"),
        (["config.json", "a.gguf", "pytorch_model.bin"], ModelError, "GGUF files; give the path of one: a.gguf"),
        (["config.json"], ModelError, f"neither {WEIGHTS} nor {INDEX}; fetch the model again"),
        (["adapter_config.json", "adapter_model.safetensors"], UnsupportedModelError, "adapter .* merge_and_unload"),
        (["config.json", "adapter_config.json", WEIGHTS], UnsupportedModelError, "holds an adapter"),
        (["b.gguf", "a.gguf"], ModelError, "no config.json but GGUF files; give the path of one of them: a.gguf, b"),
        ([WEIGHTS], ModelError, "no config.json; give a directory with config.json"),
        ([], ModelError, "no config.json"),
    ],
)
def test_another_kind_of_directory_is_told_what_to_use(
    tmp_path: Path, names: list[str], error: type[ModelError], words: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=words):
        open_checkpoint(str(tmp_path))
