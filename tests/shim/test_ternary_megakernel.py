"""Ternary models on the megakernel on the shim: after each phase the reference's bits, whatever the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onekernel.device.shim import ShimKernel
from onekernel.errors import DeviceError
from tests.megakernels import prompt_of, small_plan
from tests.shim.test_megakernel import faulty
from tests.ternary_megakernels import CONFIGS, TernaryCase

pytestmark = pytest.mark.usefixtures("host_compiler")

SLOW = pytest.mark.slow


def case_of(name: str, ctas: int = 3) -> TernaryCase:
    return TernaryCase.of(CONFIGS[name], small_plan(CONFIGS[name], ctas))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "bitnet" else SLOW) for name in CONFIGS])
def test_whole_answers_and_every_phase(name: str) -> None:
    """With six CTAs several members share the cache of a prompt of 70."""
    case = case_of(name, 6)
    megakernel, prompt = case.megakernel(ShimKernel), prompt_of(case.config, 70)
    case.check_phases(megakernel, prompt)
    case.check_answer(megakernel, prompt, 5)


@pytest.mark.parametrize("name", ["bitnet", pytest.param("int8 head", marks=SLOW)])
def test_any_number_of_ctas_gives_the_same_bits(name: str) -> None:
    """A prompt of one token; nothing before it is in the cache, and one member attends."""
    prompt, made = prompt_of(CONFIGS[name], 1), []
    for ctas in (1, 4):
        case = case_of(name, ctas)
        megakernel = case.megakernel(ShimKernel)
        made.append((case.check_answer(megakernel, prompt, 3), megakernel.logits.clone()))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])


FAULTS = {
    "missing offset of the codes": (
        "value = static_cast<float>(sum_of(of_row) - offset);",
        "value = static_cast<float>(sum_of(of_row));",
    ),
    "inputs of another unit": (
        "const u8* at = x + here * (CHUNKS * 16);",
        "const u8* at = x + here / 4 * (CHUNKS * 16);",
    ),
    "values made int8 before all have the largest": (
        "  barrier_sync(CONSUMER_BARRIER, CONSUMERS);\n  const float inverse = inverse_of(own);",
        "  const float inverse = inverse_of(own);",
    ),
    "a round of squares too few": ("root_of(m, own, task, all)", "root_of(m, own, task, all - 4)"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in FAULTS])
def test_a_planted_fault_is_caught(tmp_path: Path, name: str) -> None:
    case = case_of("bitnet", 4)
    old, new = FAULTS[name]
    megakernel = case.megakernel(
        lambda spec: ShimKernel(faulty(spec, tmp_path, "kernels/tile/quantised.cuh", old, new), seed=1)
    )
    with pytest.raises((AssertionError, DeviceError)):
        case.check_phases(megakernel, prompt_of(case.config, 70))
