"""The prefill kernels on a real GPU: as close to float32 as PyTorch in bf16, and the same bits however they are run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onekernel import LLM, SamplingParams
from onekernel.config import ModelConfig, Sampling
from onekernel.device.compile import compiler_runs, refuse_late_compiles
from onekernel.device.cuda_kernel import CudaKernel, load_kernel
from onekernel.device.facts import facts
from onekernel.device.spec import KernelSpec
from onekernel.engine.backend import MemoryReport
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.megakernel_load import prefill_kernels
from onekernel.engine.packed_prefill import PackedPrefill
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience
from onekernel.kernels.prefill.variants import VARIANTS
from tests.gpu.test_megakernel import CONTEXT, GPU, SHAPES, case_of, kernel_of
from tests.megakernels import InFloat32, prompt_of
from tests.prefills import Whole, distance
from tests.unit.plan.models import random_weights

pytestmark = pytest.mark.timeout(120)

CLOSE = 1.1
"""Times the distance of PyTorch's bf16 from float32."""
CUTS = (1, 17, 64, 130, 600, 1217)


def load(spec: KernelSpec) -> CudaKernel:
    return load_kernel(spec, GPU)


def whole_of(config: ModelConfig, tile_rows: int = 8) -> Whole:
    return Whole.of(config, random_weights(config, device=GPU), tile_rows, context=CONTEXT)


def again(whole: Whole, prefill: PackedPrefill, ids: list[int], cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """Keys and values, in a cache of NaN."""
    prefill.cache.pages.fill_(torch.nan)
    return whole.filled(prefill, ids, cuts)


@pytest.mark.parametrize("name", SHAPES)
def test_keys_and_values_are_close_to_float32_and_do_not_depend_on_the_cuts(name: str) -> None:
    whole, ids = whole_of(SHAPES[name]), prompt_of(SHAPES[name], 1300)
    prefill = whole.prefill(load, VARIANTS, sms=facts(GPU).sm_count)
    found = again(whole, prefill, ids)
    assert torch.equal(again(whole, prefill, ids, CUTS), found)
    exact, theirs = whole.reference(InFloat32(whole.weights), ids), whole.reference(whole.weights, ids)
    for layer in range(whole.config.num_hidden_layers):
        ours, limit = distance(found[layer], exact[layer]), CLOSE * distance(theirs[layer], exact[layer])
        assert ours <= limit, f"layer {layer}: {ours} from float32, PyTorch in bf16 {limit / CLOSE}"


def test_all_variants_and_tiles_give_the_same_bits_again_and_again() -> None:
    config = SHAPES["Llama-3.2-1B"]
    ids, found = prompt_of(config, 700), []
    for tile_rows in (8, 4):
        whole = whole_of(config, tile_rows)
        for variant in VARIANTS:
            prefill = whole.prefill(load, (variant,))
            found += [again(whole, prefill, ids) for _ in range(3)]
    assert all(torch.equal(other, found[0]) for other in found)


def test_decode_goes_on_from_it() -> None:
    """Greedy tokens are those that float32 would choose, to within the noise of bf16, after either prefill."""
    case = case_of(SHAPES["Llama-3.2-1B"])
    megakernel = kernel_of(case)
    prefill = prefill_kernels(megakernel, GPU)
    assert prefill is not None
    backend = MegakernelBackend(
        megakernel, memory=MemoryReport(0, 0, 0), patience=Patience(token_s=5.0, stop_s=5.0), prefill=prefill
    )
    for tokens in (2, 65, 700, 1900):
        megakernel.cache.pages.fill_(torch.nan)
        prompt = prompt_of(case.config, tokens, seed=tokens)
        sequence = backend.open(prompt, tokens + 48)
        backend.prefill(sequence, CancelToken(), lambda done, total: None)
        made = [token.token_id for token in backend.decode(sequence, Sampling(), 48, frozenset(), CancelToken())]
        backend.release(sequence)
        case.reference.check_greedy(prompt, made)


def test_it_serves_and_compiles_nothing_late() -> None:
    options: dict[str, Any] = {"load_format": "dummy", "device": GPU, "max_context": 1024}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = [5, 6, 7] * 200
    with LLM("SmolLM2-135M", **options) as llm:
        first = llm.generate(prompt, params).token_ids
    runs = compiler_runs()
    with LLM("SmolLM2-135M", **options) as llm, refuse_late_compiles():
        assert llm.generate(prompt, params).token_ids == first
        assert len(llm.generate(prompt[:33], params).token_ids) == 8
    assert compiler_runs() == runs


def test_a_bound_launch_costs_microseconds() -> None:
    """A plain launch took 16 us beside an H200; only gross slowness fails here."""
    whole = whole_of(SHAPES["SmolLM2-135M"])
    prefill = whole.prefill(load, VARIANTS[:1])
    launch: Callable[[int], None] = prefill.layers[0].norms[0].launch
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(200):
            launch(1)
        samples.append((time.perf_counter() - begun) / 200)
        torch.cuda.synchronize()
    assert min(samples) < 50e-6
