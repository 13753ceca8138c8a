"""A packed model gives back every value it was given, whatever the tiles, and pads with zeros."""

from __future__ import annotations

import pytest
import torch

from onekernel.models.packed import PackedModel, pack, tiles_of
from onekernel.phases.attention.rope import rope_table
from onekernel.weights.arena import LAYER_MATRICES, TileRows, weight_layout
from tests.unit.plan.models import CONFIGS, random_weights

TILES = [TileRows(), TileRows(4, 4, 4, 4), TileRows(residual=4, head=4)]


def packed_model(name: str, tiles: TileRows) -> PackedModel:
    config = CONFIGS[name]
    return pack(random_weights(config), config, weight_layout(config, tiles, context_tokens=50))


@pytest.mark.parametrize("tiles", TILES, ids=["8", "4", "mixed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_everything_packed_comes_back(name: str, tiles: TileRows) -> None:
    config, weights = CONFIGS[name], random_weights(CONFIGS[name])
    packed = packed_model(name, tiles)
    for layer, expected in enumerate(weights.layers):
        for kind in LAYER_MATRICES:
            assert torch.equal(packed.matrix(kind, layer), getattr(expected, kind))
            bias, wanted = packed.bias(kind, layer), getattr(expected, f"{kind}_bias")
            assert (bias is None) == (wanted is None)
            assert bias is None or torch.equal(bias, wanted.float())
    assert torch.equal(packed.matrix("head"), weights.head)
    ids = torch.tensor([0, 1, 7, config.vocab_size - 1, 7])
    assert torch.equal(packed.embedding_rows(ids), weights.embedding[ids])


def test_constants_lie_where_the_layout_says() -> None:
    config, weights = CONFIGS["qwen3"], random_weights(CONFIGS["qwen3"])
    packed = packed_model("qwen3", TileRows())
    at, floats = packed.layout.constants, packed.constants
    for layer, expected in enumerate(weights.layers):
        for offset, norm in (
            (at.attention_norms[layer], expected.attention_norm),
            (at.mlp_norms[layer], expected.mlp_norm),
        ):
            assert torch.equal(floats[offset : offset + config.hidden_size], norm)
        for base, head_norm in ((at.q_norm, expected.q_norm), (at.k_norm, expected.k_norm)):
            start = base + layer * config.head_dim
            assert head_norm is not None and torch.equal(floats[start : start + config.head_dim], head_norm)
    cos, sin = rope_table(config, 50)
    table = floats[at.rope : at.rope + 50 * config.head_dim].view(50, -1, 2)
    assert torch.equal(table[..., 0], cos) and torch.equal(table[..., 1], sin)
    packed.write_rope(rope_table(config, 20) + 1)
    assert torch.equal(table[:20, :, 0], cos[:20] + 1) and torch.equal(table[20:, :, 0], cos[20:])


@pytest.mark.parametrize("tiles", TILES, ids=["8", "4", "mixed"])
def test_padding_is_zero_and_nothing_overlaps(tiles: TileRows) -> None:
    config = CONFIGS["odd"]
    packed = packed_model("odd", tiles)
    end = 0
    for key, place in sorted(packed.layout.matrices.items(), key=lambda item: item[1].offset_bytes):
        assert place.offset_bytes % 256 == 0 and end <= place.offset_bytes
        end = place.offset_bytes + place.total_bytes
        stored = torch.count_nonzero(tiles_of(packed.arena, place))
        assert stored == torch.count_nonzero(packed.matrix(*key))
    assert end <= packed.layout.embedding_bytes
    assert packed.layout.embedding_bytes + 2 * config.vocab_size * config.hidden_size <= packed.layout.total_bytes


def test_a_unit_of_four_rows_holds_its_second_half_of_columns_where_rows_4_to_7_would_be() -> None:
    config = CONFIGS["llama"]
    weights = random_weights(config)
    packed = packed_model("llama", TileRows(residual=4))
    place = packed.layout.matrices["down", 1]
    unit = tiles_of(packed.arena, place)[3, 0].view(2, 8, 4, 8)  # half, row, quarter, element
    for row in range(4):
        for column in range(config.intermediate_size):
            within, second = column % 64, column // 64
            value = unit[within % 16 // 8, row + 4 * second, within // 16, within % 8]
            assert value == weights.layers[1].down[12 + row, column]
