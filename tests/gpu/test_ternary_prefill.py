"""The prefill kernels of ternary models on a real GPU: near the phases on PyTorch, and the same bits however cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onekernel.config import ModelConfig
from onekernel.device.cuda_kernel import CudaKernel, load_kernel
from onekernel.device.facts import facts
from onekernel.device.spec import KernelSpec
from onekernel.engine.ternary import OperatorMatrix
from onekernel.engine.ternary_prefill import TernaryPrefill
from onekernel.models.packed_weights import PackedWeights
from tests.gpu.test_megakernel import GPU
from tests.megakernels import prompt_of
from tests.prefills import Whole, distance
from tests.ternary_megakernels import BITNET, LOGITS, QWEN3, random_weights

pytestmark = pytest.mark.timeout(120)

SHAPES: dict[str, ModelConfig] = {
    "bitnet-b1.58-2B-4T": replace(
        BITNET, hidden_size=2560, intermediate_size=6912, num_attention_heads=20, num_key_value_heads=5, head_dim=128
    ),
    "groups": replace(QWEN3, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8),
}


def load(spec: KernelSpec) -> CudaKernel:
    return load_kernel(spec, GPU)


@pytest.mark.parametrize("name", SHAPES)
def test_keys_and_values_are_those_of_the_phases_and_do_not_depend_on_the_cuts(name: str) -> None:
    config = SHAPES[name]
    whole = Whole.of(config, random_weights(config), context=1344)
    packed = replace(whole.packed, arena=whole.packed.arena.to(GPU), constants=whole.packed.constants.to(GPU))
    whole, ids = replace(whole, packed=packed), prompt_of(config, 1300)
    wgmma = facts(GPU).capability == (9, 0)
    prefill = TernaryPrefill(packed, whole.cache(), load, sms=facts(GPU).sm_count, wgmma=wgmma)
    found = []
    for cuts in ((1024,), (1, 17, 64, 130, 600), (127, 1000)):
        prefill.cache.pages.fill_(torch.nan)
        found.append(whole.filled(prefill, ids, cuts))  # type: ignore[arg-type]
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    wanted = whole.reference(PackedWeights(packed, OperatorMatrix), ids)
    assert distance(found[0][0], wanted[0]) < 1e-3
    assert distance(found[0][1], wanted[1]) < LOGITS
