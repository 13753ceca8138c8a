"""GGUF files: the real one against the `gguf` package, tiny ones of every type, damaged and refused ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import read_all
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.layout import check_tensors
from onekernel.weights.open import open_checkpoint
from tests.unit.weights.gguf_files import METADATA, permute, random_blocks, write_gguf
from tests.unit.weights.tiny import CONFIG, tensors

WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDE_METADATA = METADATA | {"embedding_length": 256, "feed_forward_length": 512}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[GgufCheckpoint]:
    checkpoint = GgufCheckpoint(smollm2_gguf)
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="module")
def reader(smollm2_gguf: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(smollm2_gguf)


def test_all_metadata_of_smollm2_is_what_the_package_reads(smollm2: GgufCheckpoint, reader: gguf.GGUFReader) -> None:
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert smollm2.metadata == expected
    assert len(smollm2.metadata["tokenizer.ggml.tokens"]) == 49152


def test_all_tensors_of_smollm2_are_bit_equal(smollm2: GgufCheckpoint, reader: gguf.GGUFReader) -> None:
    parts = {"attn_q": ("self_attn.q_proj", 9), "attn_k": ("self_attn.k_proj", 3)}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    mapped = {names.get_name(name, try_suffixes=(".weight",)): name for name in smollm2.tensors}
    assert len(reader.tensors) == len(mapped) == 272
    for stored in reader.tensors:
        ours = smollm2.read(mapped[stored.name])
        heads = next((count for part, (_, count) in parts.items() if f".{part}." in stored.name), 0)
        theirs = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type)).to(ours.dtype)
        bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
        again = ours.view(bits).numpy()
        again = permute(again, heads) if heads else again
        assert np.array_equal(again, theirs.view(bits).numpy()), stored.name
        assert smollm2.tensors[mapped[stored.name]].stored_bytes == stored.n_bytes


def test_smollm2_is_whole_and_says_what_it_costs(smollm2: GgufCheckpoint) -> None:
    config = model_config(smollm2.settings.config)
    check_tensors(config, smollm2)
    assert config.parameters == 134_515_008
    assert (config.rope_theta, config.tie_word_embeddings, config.max_position_embeddings) == (1e5, True, 8192)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert smollm2.settings.name == "SmolLM2-135M-Instruct.Q4_1"
    assert smollm2.settings.config["eos_token_id"] == 2
    assert smollm2.settings.generation_config == {"eos_token_id": [2]}
    assert smollm2.settings.tokenizer.gguf_metadata is smollm2.metadata
    (note,) = smollm2.settings.notes
    assert "Q4_1, Q8_0" in note
    assert "98.4 MB in the file become 269.0 MB" in note


def test_the_head_of_smollm2_takes_a_third_of_a_second_at_most(smollm2_gguf: Path) -> None:
    times = []
    for _ in range(3):
        start = time.process_time()  # not the clock: other tests may share the core
        GgufCheckpoint(smollm2_gguf).close()
        times.append(time.process_time() - start)
    assert min(times) < 0.3


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_model_comes_back_as_it_was_before_conversion(tmp_path: Path, arch: str) -> None:
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    config = CONFIG | {"architectures": [f"{family}ForCausalLM"], "attention_bias": arch == "llama", "dtype": "float32"}
    metadata = METADATA
    if arch == "qwen3":
        config, metadata = config | {"head_dim": 24}, METADATA | {"attention.key_length": 24}
    saved = tensors(config, torch.float32)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", saved, arch, metadata)))
    read = model_config(checkpoint.settings.config)
    assert read.rms_norm_eps == pytest.approx(1e-5)
    assert read == model_config(config | {"rms_norm_eps": read.rms_norm_eps})
    check_tensors(read, checkpoint)
    found = dict(read_all(checkpoint))
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name
    assert checkpoint.settings.notes == ()


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_every_small_type_is_expanded_as_the_package_does(tmp_path: Path, kind: Type) -> None:
    saved = tensors(CONFIG, torch.float32)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "tiny.gguf", saved, kind=kind))
    for name, tensor in read_all(checkpoint):
        if tensor.ndim == 1:
            assert torch.equal(tensor, saved[name])
            continue
        values = torch.from_numpy(gguf.dequantize(gguf.quantize(saved[name].numpy(), kind), kind))
        assert tensor.dtype == (torch.float16 if kind == Type.F16 else torch.bfloat16)
        assert torch.equal(tensor, values.to(tensor.dtype)), name
        assert checkpoint.tensors[name].stored_type == kind.name
    assert checkpoint.settings.config["dtype"] == ("float16" if kind == Type.F16 else "bfloat16")
    assert bool(checkpoint.settings.notes) == (kind not in (Type.F16, Type.BF16))


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_every_k_type_is_expanded_as_the_package_does(
    tmp_path: Path, kind: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onekernel.weights.gguf._CHUNK_VALUES", 7 * 256)  # a matrix in several uneven pieces
    saved = tensors(WIDE, torch.float32)
    blocks = random_blocks(256, 256, kind)
    del saved[Q_PROJ]
    path = write_gguf(tmp_path / "k.gguf", saved, metadata=WIDE_METADATA, raw={"blk.1.attn_q.weight": (blocks, kind)})
    checkpoint = GgufCheckpoint(path)
    read = checkpoint.read(Q_PROJ)
    values = torch.from_numpy(gguf.dequantize(blocks, kind))
    assert values.isfinite().all()
    assert torch.equal(torch.from_numpy(permute(read.float().numpy(), 4)), values.to(torch.bfloat16).float())
    info = checkpoint.tensors[Q_PROJ]
    assert (info.shape, info.stored_type, info.stored_bytes) == ((256, 256), kind.name, blocks.nbytes)
