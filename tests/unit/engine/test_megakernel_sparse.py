"""A published sparse model, from its files through the backend, with sparse feed-forwards on the shim."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from onekernel.config import Sampling
from onekernel.device.shim import ShimKernel
from onekernel.device.shim_build import find_host_compiler
from onekernel.engine.backend import MemoryReport
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience
from onekernel.models.model import Model
from onekernel.models.registry import model_config
from onekernel.weights.open import open_checkpoint
from tests.megakernels import (
    Reference,
    ThreadedKernel,
    ThreadedMegakernel,
    packed_of,
    prompt_of,
    put_together,
    small_plan,
    weights_of,
)
from tests.unit.weights.test_published_sparse import for_kernels, write

TOKENS = 5


def test_a_published_model_is_served_from_the_one_packed_copy(tmp_path: Path) -> None:
    find_host_compiler()
    write(tmp_path, for_kernels)
    checkpoint = open_checkpoint(str(tmp_path))
    config = model_config(checkpoint.settings.config)
    plan = small_plan(config, active_fraction=0.5)
    megakernel = put_together(
        plan,
        packed_of(checkpoint, plan),
        lambda spec: ThreadedKernel(ShimKernel(spec, timeout_s=100.0)),
        ThreadedMegakernel,
    )
    backend = MegakernelBackend(megakernel, memory=MemoryReport(0, 0, 0), patience=Patience(token_s=20.0, stop_s=20.0))
    assert backend.active_neurons is None
    prompt = prompt_of(config, 20)
    sequence = backend.open(prompt, len(prompt) + TOKENS)
    backend.prefill(sequence, CancelToken(), lambda done, total: None)
    with closing(backend.decode(sequence, Sampling(), TOKENS, frozenset(), CancelToken())) as answer:
        tokens = [token.token_id for token in answer]
    backend.release(sequence)
    assert len(tokens) == TOKENS
    Reference(Model(config, weights_of(checkpoint, config))).check_greedy(prompt, tokens)
    active = backend.active_neurons
    assert active is not None and len(active) == config.num_hidden_layers
    assert all(0 < count < config.intermediate_size for count in active)
    resting = sum(config.intermediate_size - count for count in active)
    assert backend.resting_bytes == int(4 * config.hidden_size * resting)
