"""The prefill kernels of ternary models put together: what is launched for a chunk, and the cache that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from onekernel.config import ModelConfig
from onekernel.device.shim import ShimKernel
from onekernel.device.spec import KernelSpec
from onekernel.engine import megakernel_load, ternary_prefill
from onekernel.engine.ternary_prefill import TernaryPrefill, why_not, workspace_bytes
from onekernel.weights.arena import TileRows, weight_layout
from tests.megakernels import prompt_of
from tests.prefills import Whole, distance
from tests.ternary_megakernels import BITNET, CONFIGS, LOGITS, QWEN3, random_weights
from tests.unit.device.fakes import gpu
from tests.unit.engine.test_packed_prefill import Recorder

SUB_NORMS = replace(BITNET, hidden_size=256, intermediate_size=352)
PRODUCTS = ["quantise", "prefill"]
LAYER = [*PRODUCTS, "append", "attention", *3 * PRODUCTS]


def whole_of(config: ModelConfig) -> Whole:
    return Whole.of(config, random_weights(config))


def test_a_chunk_is_ten_launches_a_layer_and_three_in_the_last() -> None:
    notes: list[tuple[str, int, tuple[float, ...]]] = []
    whole = whole_of(SUB_NORMS)
    prefill = TernaryPrefill(whole.packed, whole.cache(), lambda spec: Recorder(spec, notes), sms=132, wgmma=True)
    prefill.run(list(range(100)), whole.table, 64)
    names = [name.removeprefix("ternary_") for name, _, _ in notes]
    assert names == ["embed", *(SUB_NORMS.num_hidden_layers - 1) * LAYER, *LAYER[:3]]
    assert notes[1] == ("ternary_quantise", 100, ())
    assert notes[3] == ("append", 100, (100, 64))
    assert all(numbers == (100,) for name, _, numbers in notes if name == "ternary_prefill")
    notes.clear()
    prefill.run([1] * 128, whole.table, 0)
    assert {name for name, _, _ in notes if name in ("ternary_prefill", "ternary_wgmma")} == {"ternary_wgmma"}


def test_the_workspace_is_what_is_allocated() -> None:
    whole = whole_of(SUB_NORMS)
    prefill = TernaryPrefill(whole.packed, whole.cache(), lambda spec: Recorder(spec, []), sms=4, chunk_tokens=48)
    acts = prefill.activations
    held = prefill.ids.nbytes + sum(getattr(acts, field.name).nbytes for field in fields(acts))
    assert held == workspace_bytes(SUB_NORMS, 48)


def test_where_the_kernels_do_not_fit_there_is_a_reason() -> None:
    def reason(config: ModelConfig, shared_bytes: int = 232_448) -> str | None:
        return why_not(config, weight_layout(config, TileRows(), context_tokens=64), shared_bytes)

    assert reason(SUB_NORMS) is None
    assert reason(QWEN3) is None
    assert "have biases" in str(reason(CONFIGS["odd"]))
    assert "sixteens" in str(reason(BITNET))
    assert "of shared memory" in str(reason(SUB_NORMS, 40_000))
    assert "not ternary" in str(reason(replace(SUB_NORMS, ternary=None)))


def test_it_is_taken_wherever_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_of(SUB_NORMS)
    monkeypatch.setattr(megakernel_load, "facts", lambda device: gpu())
    monkeypatch.setattr(megakernel_load, "load_kernel", lambda spec, device, cache: Recorder(spec, []))

    class Holder:
        packed, cache = whole.packed, whole.cache()

    holder: Any = Holder()
    assert isinstance(megakernel_load.prefill_kernels(holder, "cuda:0"), TernaryPrefill)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tokens", "cuts"),
    [
        (SUB_NORMS, 40, (1, 17)),
        (QWEN3, 40, (3,)),
        (replace(SUB_NORMS, sub_norms=False, hidden_act="silu"), 20, (16,)),
    ],
    ids=["sub-norms", "groups", "silu"],
)
def test_keys_and_values_are_the_reference_s_however_the_prompt_is_cut(
    config: ModelConfig, tokens: int, cuts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first layer to within the rounding of RoPE; in the others int8 values part where attention does.

    With few tokens for a warpgroup's products, so that both kernels have a part of the prompt: a CTA for each of more
    tokens would be too many threads at once.
    """
    monkeypatch.setattr(ternary_prefill, "LEAST_TOKENS", 20)
    whole, ids = whole_of(config), prompt_of(config, tokens)

    def load(spec: KernelSpec) -> ShimKernel:
        return ShimKernel(spec, timeout_s=100.0)

    def filled(cuts: Sequence[int]) -> torch.Tensor:
        prefill = TernaryPrefill(whole.packed, whole.cache(), load, sms=4, wgmma=True)
        for field in ("residual", "qkv", "queries", "mixed", "inner", "inverse"):
            getattr(prefill.activations, field).fill_(torch.nan)
        return whole.filled(prefill, ids, cuts)  # type: ignore[arg-type]

    found, wanted = filled(()), whole.reference(whole.weights, ids)
    assert torch.equal(filled(cuts), found)
    assert distance(found[0], wanted[0]) < 1e-3
    for layer in range(1, config.num_hidden_layers):
        assert distance(found[layer], wanted[layer]) < LOGITS
