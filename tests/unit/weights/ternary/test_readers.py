"""What takes published forms apart: nothing is lost, and what is not ternary is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from onekernel.errors import ConfigError, ModelError, UnsupportedModelError
from onekernel.models.registry import model_config
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary import gguf_blocks, hf_packed
from onekernel.weights.ternary.absmean import quantise
from onekernel.weights.ternary.checkpoint import TernaryCheckpoint
from onekernel.weights.ternary.fused import by_group, fuse
from onekernel.weights.ternary.matrix import TernaryMatrix
from tests import ternary_models as models
from tests.ternary_models import BITNET, FIRST, LLAMA, QWEN

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def opened(source: Path) -> TernaryCheckpoint:
    checkpoint = open_checkpoint(str(source))
    return TernaryCheckpoint(checkpoint, model_config(checkpoint.settings.config))


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**31))
def test_hugging_face_packing_loses_nothing(rows: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (rows, columns), generator=draw, dtype=torch.int8)
    packed = hf_packed.pack(codes)
    assert packed.shape == (hf_packed.packed_rows(rows), columns)
    assert torch.equal(hf_packed.unpack(packed, rows, "x"), codes)
    assert torch.equal(packed, models.hf_pack(codes.numpy()))


def test_a_code_of_3_is_no_ternary_one() -> None:
    with pytest.raises(ModelError, match="blk has codes of 3"):
        hf_packed.unpack(torch.tensor([[3]], dtype=torch.uint8), 4, "blk")
    blocks = np.full((1, 18), 255, np.uint8)
    with pytest.raises(ModelError, match="blk of type Q2_0 has codes of 3"):
        gguf_blocks.decode("Q2_0", blocks.reshape(-1), (1, 64), "blk")


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("unequal", [False, True])
def test_gguf_blocks_are_those_of_the_gguf_package(kind: str, unequal: bool) -> None:
    draw = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[kind]
    scales = draw.uniform(0.5, 2, (7, 3, 1)) if unequal else 0.75
    values = (draw.integers(-1, 2, (7, 3, 256)) * scales).astype(np.float32).reshape(7, 768)
    values[2, :256] = 0  # a block without a scale
    blocks = gguf.quantize(values, number)
    matrix = gguf_blocks.decode(kind, blocks.reshape(-1), (7, 768), "x")
    assert matrix.group == (128 if unequal else None)
    assert torch.equal(matrix.dequantised(), torch.from_numpy(gguf.dequantize(blocks, number)))


@given(st.sampled_from([None, 64, 128]), st.booleans(), st.integers(0, 2**31))
def test_expanding_and_quantising_again_changes_nothing(group: int | None, half: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (9, 256), generator=draw, dtype=torch.int8)
    scales = torch.rand((1,) if group is None else (9, 256 // group), generator=draw) + 0.01
    scales = scales.to(torch.bfloat16).float() if half else scales
    matrix = TernaryMatrix(codes, scales, group=group)
    values = matrix.dequantised().to(torch.bfloat16) if half else matrix.dequantised()
    again = quantise(values, group)
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.scales, scales)


def test_masters_round_half_to_even_at_their_mean() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.0, 0.0]])  # mean of sizes: 1
    matrix = quantise(weight)
    assert matrix.scales.tolist() == [1.0]
    assert matrix.codes.tolist() == [[1, -1, 0, 0, 1, -1, 1, 0]]
    assert quantise(torch.tensor([[1e-7, 2e-7]])).scales.item() == pytest.approx(1e-5)
    zeros = quantise(torch.zeros(1, 4))
    assert zeros.codes.tolist() == [[0] * 4] and zeros.scales.item() == pytest.approx(1e-5)


@pytest.mark.parametrize(("shape", "group"), [((0, 4), None), ((4, 0), 64), ((8,), None), ((2, 96), 64)])
def test_masters_of_another_shape_are_refused(shape: tuple[int, ...], group: int | None) -> None:
    with pytest.raises(ConfigError, match=r"a master weight has shape .*; it must be \(N, K\), not empty"):
        quantise(torch.ones(shape), group)


def test_fusing_keeps_each_projection_its_scales() -> None:
    one = TernaryMatrix(torch.ones(3, 128, dtype=torch.int8), torch.tensor([0.5]))
    other = TernaryMatrix(torch.ones(5, 128, dtype=torch.int8), torch.tensor([2.0]))
    fused = fuse([one, other])
    assert fused.rows == (3, 5)
    assert fused.dequantised()[:, 0].tolist() == [0.5] * 3 + [2.0] * 5
    mixed = fuse([one, by_group(other, 64)])
    assert mixed.group == 64
    assert torch.equal(mixed.dequantised(), fused.dequantised())
    assert by_group(mixed, 128) is mixed
    with pytest.raises(ModelError, match="groups of 64 and 128 columns"):
        fuse([mixed, by_group(other, 128)])


@pytest.mark.parametrize("shape", [(16,), (0, 16), (4, 0), (16, 4)])
def test_packed_codes_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=r"x has packed codes of shape .*; 16 rows are \(4, K\)"):
        hf_packed.unpack(torch.zeros(shape, dtype=torch.uint8), 16, "x")


def damaged(folder: Path, config: dict[str, Any], change: Any) -> Path:
    models.write_packed(folder, models.make(config))
    saved = load_file(folder / "model.safetensors")
    change(saved)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_packed_weights_without_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="packed ternary weights without weight_scale"):
        opened(damaged(tmp_path, BITNET, lambda saved: saved.pop(Q_PROJ + "_scale")))


def test_packed_weights_of_an_unstated_convention_are_refused(tmp_path: Path) -> None:
    models.write_packed(tmp_path, models.make(BITNET))
    models.write_config(tmp_path, {key: value for key, value in BITNET.items() if key != "quantization_config"})
    with pytest.raises(ModelError, match="to multiply by weight_scale or to divide"):
        opened(tmp_path)


UNSOUND = [0.0, -1.0, float("inf"), float("nan")]


@pytest.mark.parametrize("scale", UNSOUND)
@pytest.mark.parametrize("config", [BITNET, LLAMA, QWEN], ids=["multiply", "divide", "groups"])
def test_unsound_scales_are_refused(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    view = opened(damaged(tmp_path, config, lambda saved: saved[Q_PROJ + "_scale"].view(-1)[-1:].fill_(scale)))
    with pytest.raises(ModelError, match=rf"q_proj.weight_scale of .* has a scale of {scale:g}; .* finite and above 0"):
        view.ternary(Q_PROJ)


def test_a_scale_whose_reciprocal_is_no_number_is_refused(tmp_path: Path) -> None:
    view = opened(damaged(tmp_path, LLAMA, lambda saved: saved[Q_PROJ + "_scale"].fill_(1e-40)))
    with pytest.raises(ModelError, match=r"1 / .*q_proj.weight_scale of .* has a scale of inf"):
        view.ternary(Q_PROJ)


@pytest.mark.parametrize("scale", UNSOUND)
@pytest.mark.parametrize("kind", ["I2_S", "TQ1_0", "TQ2_0", "Q2_0", "Q2_0_128"])
def test_unsound_scales_of_gguf_blocks_are_refused(kind: str, scale: float) -> None:
    codes = np.ones((2, 256), np.int8)
    data, _ = models._gguf_bytes(codes, np.full((1, 1), scale, np.float32), kind)
    with pytest.raises(ModelError, match=f"blk has a scale of {scale:g}"):
        gguf_blocks.decode(kind, data.reshape(-1), (2, 256), "blk")


def test_gguf_blocks_of_zeros_need_no_scale() -> None:
    for kind in ("I2_S", "TQ2_0", "Q2_0"):
        data, _ = models._gguf_bytes(np.zeros((2, 256), np.int8), np.zeros((1, 1), np.float32), kind)
        assert gguf_blocks.decode(kind, data.reshape(-1), (2, 256), "blk").dequantised().count_nonzero() == 0


def test_masters_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    models.write_masters(tmp_path, models.make(BITNET))
    saved = load_file(tmp_path / "model.safetensors")
    saved[Q_PROJ][0, 0] = float("nan")
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"q_proj.weight of .* has a scale of nan"):
        opened(tmp_path).ternary(Q_PROJ)


@pytest.mark.parametrize("shape", [(0,), (256, 0), (3,), (256, 3), (200,), (128, 2)])
@pytest.mark.parametrize("config", [BITNET, QWEN], ids=["one", "groups"])
def test_scales_of_another_shape_are_refused(config: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    view = opened(damaged(tmp_path, config, lambda saved: saved.update({Q_PROJ + "_scale": torch.ones(shape)})))
    with pytest.raises(ModelError, match=rf"q_proj.weight_scale of .* has shape {re.escape(str(shape))}; .* one scale"):
        view.ternary(Q_PROJ)


@pytest.mark.parametrize(
    ("scales", "words"), [(torch.ones(3), r"shape \(3,\); it must be \(320,\)"), (torch.zeros(320), "scale of 0;")]
)
def test_unsound_scales_of_an_int8_head_are_refused(scales: torch.Tensor, words: str, tmp_path: Path) -> None:
    head = {"lm_head.weight": torch.ones(320, 256, dtype=torch.int8), "lm_head.weight_scale": scales}
    view = opened(damaged(tmp_path, BITNET, lambda saved: saved.update(head)))
    with pytest.raises(ModelError, match=rf"lm_head.weight_scale of .* {words}"):
        view.int8_head()


def test_group_scales_where_the_config_has_none_are_refused(tmp_path: Path) -> None:
    models.write_packed(tmp_path, models.make(QWEN))
    quantization = {key: value for key, value in QWEN["quantization_config"].items() if key != "group_size"}
    models.write_config(tmp_path, QWEN | {"quantization_config": quantization})
    with pytest.raises(ModelError, match="has a scale for each 128 columns"):
        opened(tmp_path).ternary(Q_PROJ)


@pytest.mark.parametrize("config", [BITNET, LLAMA], ids=["tied", "untied"])
def test_an_int8_head_that_is_stated_alone_is_made_of_the_dense_one(config: dict[str, Any], tmp_path: Path) -> None:
    numbers = models.make(config)
    models.write_packed(tmp_path, numbers)
    models.write_config(tmp_path, config | {"quantization_config": config["quantization_config"] | {"head": "int8"}})
    values, scales = opened(tmp_path).int8_head()
    dense = numbers.dense["model.embed_tokens.weight" if config is BITNET else "lm_head.weight"]
    assert ((values * scales[:, None] - dense).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize(
    ("config", "change", "error", "words"),
    [
        (BITNET, {"linear_class": "other"}, UnsupportedModelError, "linear_class is 'other'"),
        (BITNET, {"use_rms_norm": True}, UnsupportedModelError, "a norm inside each projection"),
        (BITNET, {"head": "int4"}, ModelError, "head is 'int4'; it must be dense"),
        (QWEN, {"group_size": 32}, ModelError, "group of ternary scales is 32"),
        (QWEN | {"intermediate_size": 192}, {}, ModelError, "intermediate_size is 192, not a multiple"),
    ],
)
def test_quantisations_that_are_not_built_in(
    config: dict[str, Any], change: dict[str, Any], error: type[ModelError], words: str, tmp_path: Path
) -> None:
    models.write_packed(tmp_path, models.make(BITNET))
    models.write_config(tmp_path, config | {"quantization_config": config["quantization_config"] | change})
    with pytest.raises(error, match=words):
        opened(tmp_path)


def test_other_bits_are_not_built_in() -> None:
    for name in ("weight_bits", "input_bits"):
        with pytest.raises(UnsupportedModelError, match=f"{name} is 4"):
            model_config(FIRST | {name: 4})


def test_ternary_projections_beside_others_are_refused(tmp_path: Path) -> None:
    numbers = models.make(LLAMA)
    path = models.write_gguf(tmp_path / "m.gguf", numbers, "TQ2_0", "llama")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # dimensions, then the type
    assert data[at] == 35
    data[at : at + 4] = (12).to_bytes(4, "little")  # Q4_K
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="types Q4_K, TQ2_0; ternary ones beside others"):
        GgufCheckpoint(path)


def test_a_gguf_with_two_kinds_of_scales_is_refused(tmp_path: Path) -> None:
    numbers = models.make(LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    uneven = np.repeat(numbers.scales[name], 512, axis=0) * np.linspace(1, 2, 512, dtype=np.float32)[:, None]
    numbers = models.with_scales(numbers, numbers.scales | {name: uneven})
    checkpoint = GgufCheckpoint(models.write_gguf(tmp_path / "m.gguf", numbers, "TQ2_0", "llama"))
    view = TernaryCheckpoint(checkpoint, model_config(checkpoint.settings.config))
    assert view.ternary(Q_PROJ).group is None
    with pytest.raises(ModelError, match="such a mixture is not built in"):
        view.ternary(name)


def test_a_matrix_that_is_no_ternary_form_is_refused(tmp_path: Path) -> None:
    view = opened(
        damaged(tmp_path, BITNET, lambda saved: saved.update({Q_PROJ: torch.ones(256, 256, dtype=torch.int8)}))
    )
    with pytest.raises(ModelError, match="is stored as I8, which is no ternary form"):
        view.ternary(Q_PROJ)


def test_config_errors_stay_config_errors() -> None:
    with pytest.raises(ConfigError, match="must be int8"):
        TernaryMatrix(torch.ones(2, 2), torch.ones(1))
