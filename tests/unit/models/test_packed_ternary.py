"""Ternary weights packed for the megakernel are the same model, and the operators' and its copy are one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.config import ModelConfig, Ternary
from onekernel.models.model import Model, Place, Weights
from onekernel.models.packed import PackedModel, pack
from onekernel.models.packed_weights import GateAndUp, PackedWeights, scratch_bytes
from onekernel.models.registry import model_config
from onekernel.models.ternary import load_packed_ternary, load_ternary
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.weights.arena import LAYER_MATRICES, TileRows, weight_layout
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.int8_rows import pack_rows, unpack_rows
from tests import ternary_models
from tests.ternary_megakernels import CONFIGS, random_weights


def quiet(done: int, total: int) -> None:
    pass


def packed_of(name: str) -> PackedModel:
    config = CONFIGS[name]
    return pack(random_weights(config), config, weight_layout(config, TileRows(), context_tokens=64))


def logits_of(config: ModelConfig, weights: Weights) -> torch.Tensor:
    cache = KVCache.allocate(config, 1, torch.bfloat16, "cpu")
    place = Place(cache, torch.tensor([0]), rope_table(config, 64), 0)
    return Model(config, weights).logits([5, 3, 8, 100, 7], place)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_weights_are_the_same_model(name: str) -> None:
    packed = packed_of(name)
    assert torch.equal(
        logits_of(packed.config, PackedWeights(packed)), logits_of(packed.config, random_weights(packed.config))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_views_that_hold_what_was_packed(name: str) -> None:
    packed, weights = packed_of(name), random_weights(CONFIGS[name])
    x = torch.randn(3, packed.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for layer, own in enumerate(weights.layers):
        for kind in LAYER_MATRICES:
            tiles, whole = packed.ternary(kind, layer), getattr(own, kind)
            assert tiles.codes.untyped_storage().data_ptr() == packed.arena.untyped_storage().data_ptr()
            assert tiles.scales.untyped_storage().data_ptr() == packed.constants.untyped_storage().data_ptr()
            if kind != "gate_up":
                assert torch.equal(tiles.unpack().dequantised(), whole.matrix.dequantised())
        assert not isinstance(own.gate_up, torch.Tensor)
        apart = GateAndUp(TernaryReference(packed.ternary("gate_up", layer).unpack()), packed.config.intermediate_size)
        assert torch.equal(apart.linear(x), own.gate_up.linear(x))
        assert torch.equal(apart.normed_linear(x, own.mlp_norm, 1e-5), own.gate_up.normed_linear(x, own.mlp_norm, 1e-5))
    assert scratch_bytes(packed.layout) == 0


def test_an_int8_head_comes_back() -> None:
    packed, weights = packed_of("int8 head"), random_weights(CONFIGS["int8 head"])
    assert isinstance(weights.head, Int8Rows)
    values, scales = packed.int8_head()
    assert torch.equal(values, weights.head.values) and torch.equal(scales, weights.head.scales)
    assert not packed.layout.embed_packed  # the embedding of a tied model stands beside its int8 head
    ids = torch.arange(packed.config.vocab_size)
    assert torch.equal(packed.embedding[ids], weights.embedding[ids])


@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (33, 100), (203, 320)])
def test_int8_rows_pack_and_unpack(shape: tuple[int, int]) -> None:
    values = torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    rows, columns = -(-shape[0] // 16) * 16, -(-shape[1] // 128) * 128
    tiles = torch.full((rows * columns,), 77, dtype=torch.uint8)
    pack_rows(values, tiles)
    assert torch.equal(unpack_rows(tiles, *shape), values)
    padded = unpack_rows(tiles, rows, columns)
    assert int(padded.count_nonzero()) == int(values.count_nonzero())


def test_a_lane_finds_its_fragment_of_an_int8_tile() -> None:
    """Written out from the layout's definition: word j, byte b of lane l."""
    values = torch.arange(16 * 128).view(16, 128).remainder(251).sub(125).to(torch.int8)
    tiles = torch.empty(16 * 128, dtype=torch.uint8)
    pack_rows(values, tiles)
    for tile, lane, j, b in ((0, 0, 0, 0), (1, 5, 3, 2), (3, 31, 1, 3), (2, 18, 2, 1)):
        row, column = lane // 4 + 8 * (j % 2), 32 * tile + 8 * (lane % 4) + 4 * (j // 2) + b
        assert int(tiles.view(torch.int8)[tile * 512 + 16 * lane + 4 * j + b]) == int(values[row, column])


@pytest.mark.parametrize("head", ["dense", "int8"])
@pytest.mark.parametrize("published", [ternary_models.BITNET, ternary_models.LLAMA, ternary_models.QWEN])
def test_files_are_read_straight_into_the_arenas(published: dict[str, Any], head: str, tmp_path: Path) -> None:
    """As `load_ternary` and `pack` would, with sub-norms, scales that divide, groups, and a head that is made int8."""
    quantization = published["quantization_config"] | {"head": head}
    ternary_models.write_packed(tmp_path, ternary_models.make(published | {"quantization_config": quantization}))
    checkpoint = open_checkpoint(str(tmp_path))
    config = model_config(checkpoint.settings.config)
    assert config.ternary is not None and config.ternary.head == head
    layout = weight_layout(config, TileRows(head=4), context_tokens=64)
    seen: list[tuple[int, int]] = []
    packed = load_packed_ternary(
        checkpoint, config, layout, device="cpu", progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)
    weights = load_ternary(checkpoint, config, dtype=torch.bfloat16, device="cpu", progress=quiet)
    assert torch.equal(logits_of(config, PackedWeights(packed)), logits_of(config, weights))


def test_an_int8_head_is_packed_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("onekernel.weights.ternary.checkpoint._PART_ROWS", 48)
    quantization = ternary_models.BITNET["quantization_config"] | {"head": "int8"}
    ternary_models.write_packed(
        tmp_path, ternary_models.make(ternary_models.BITNET | {"quantization_config": quantization})
    )
    checkpoint = open_checkpoint(str(tmp_path))
    config = model_config(checkpoint.settings.config)
    layout = weight_layout(config, TileRows(), context_tokens=64)
    packed = load_packed_ternary(checkpoint, config, layout, device="cpu", progress=quiet)
    weights = load_ternary(checkpoint, config, dtype=torch.bfloat16, device="cpu", progress=quiet)
    assert isinstance(weights.head, Int8Rows)
    values, scales = packed.int8_head()
    assert torch.equal(values, weights.head.values) and torch.equal(scales, weights.head.scales)


def test_a_ternary_embedding_is_not_packed() -> None:
    config = replace(CONFIGS["bitnet"], ternary=Ternary())
    weights = random_weights(config)
    table = TernaryReference(weights.layers[0].down.matrix)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="only a dense embedding"):
        pack(replace(weights, embedding=table), config, weight_layout(config, TileRows(), context_tokens=64))
