"""The prefill kernels put together: what is launched for a chunk, what it needs, and answers that begin with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from onekernel.config import Sampling
from onekernel.device.shim import ShimKernel
from onekernel.device.spec import KernelSpec, Scalar
from onekernel.engine import megakernel_load
from onekernel.engine.backend import MemoryReport
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.packed_prefill import PackedPrefill, usable_variants, why_not, workspace_bytes
from onekernel.engine.paged_backend import PagedSequence
from onekernel.engine.request import CancelToken
from onekernel.errors import ConfigError
from onekernel.kernels.prefill.variants import VARIANTS
from onekernel.models.model import Model
from onekernel.weights.arena import TileRows, weight_layout
from tests.megakernels import Reference, checkpoint_of, packed_of, prompt_of, put_together, small_plan, weights_of
from tests.prefills import Whole
from tests.unit.device.fakes import gpu
from tests.unit.plan.models import CONFIGS, random_weights

LAYER = ["norm", "product", "append", "attention", "product", "norm", "product", "product"]


class Recorder:
    """A kernel whose prepared launches do nothing and are noted as (kernel, grid, numbers)."""

    def __init__(self, spec: KernelSpec, notes: list[tuple[str, int, tuple[float, ...]]]) -> None:
        self.spec, self._notes = spec, notes

    def launch(self, grid: int, block: int, args: Sequence[Any], **options: Any) -> None:
        raise AssertionError("prefill prepares its launches")

    def bind(self, block: int, args: Sequence[Any], *, shared_bytes: int = 0, changing: Sequence[str] = ()) -> Any:
        assert len(args) == len(self.spec.params)
        numbers = {param.name for param in self.spec.params if isinstance(param, Scalar)}
        assert set(changing) <= numbers
        return Launches(self.spec.entry.removeprefix("prefill_"), self._notes)


class Launches:
    def __init__(self, name: str, notes: list[tuple[str, int, tuple[float, ...]]]) -> None:
        self._name, self._notes = name, notes

    def launch(self, grid: int, *numbers: float) -> None:
        self._notes.append((self._name, grid, numbers))


def test_a_chunk_is_eight_launches_a_layer_and_three_in_the_last() -> None:
    """What follows the last layer's keys and values is for the head, which prefill does not have."""
    notes: list[tuple[str, int, tuple[float, ...]]] = []
    config = CONFIGS["qwen3"]
    whole = Whole.of(config, random_weights(config))
    loaded: Counter[str] = Counter()

    def load(spec: KernelSpec) -> Recorder:
        loaded[spec.entry] += 1
        return Recorder(spec, notes)

    prefill = PackedPrefill(whole.packed, whole.cache(), load, sms=132)
    assert 1 <= loaded.pop("prefill_product") <= len(VARIANTS)
    assert set(loaded.values()) == {1}
    prefill.run(list(range(100)), whole.table, 64)
    assert [name for name, _, _ in notes] == ["embed", *(config.num_hidden_layers - 1) * LAYER, *LAYER[:3]]
    assert notes[0] == ("embed", 100, ())
    assert notes[1] == ("norm", 100, ())
    assert notes[3] == ("append", 100, (100, 64))  # 8 heads' vectors of a token, 8 of them a CTA
    assert notes[4] == ("attention", 4 * 2, (100, 64))
    assert all(numbers == (100,) for name, _, numbers in notes if name == "product")
    assert prefill.ids[:100].tolist() == list(range(100))


@pytest.mark.parametrize(("tokens", "start"), [(0, 0), (49, 0), (16, 241), (1, -1)])
def test_what_is_no_chunk_is_refused(tokens: int, start: int) -> None:
    config = CONFIGS["llama"]
    whole = Whole.of(config, random_weights(config))
    prefill = PackedPrefill(whole.packed, whole.cache(), lambda spec: Recorder(spec, []), sms=4, chunk_tokens=48)
    with pytest.raises(ConfigError, match=f"{tokens} tokens from position {start} on are no chunk"):
        prefill.run([0] * tokens, whole.table, start)


@pytest.mark.parametrize("name", ["odd", "head256", "tied"])
def test_the_workspace_is_what_is_allocated(name: str) -> None:
    config = CONFIGS[name]
    whole = Whole.of(config, random_weights(config))
    prefill = PackedPrefill(whole.packed, whole.cache(), lambda spec: Recorder(spec, []), sms=4, chunk_tokens=48)
    held = prefill.ids.nbytes + sum(
        getattr(prefill.activations, field.name).nbytes for field in fields(prefill.activations)
    )
    assert held == workspace_bytes(config, whole.packed.layout, 48)
    assert prefill.chunk_tokens == 48


def test_where_the_kernels_do_not_fit_there_is_a_reason() -> None:
    config = CONFIGS["llama"]
    layout = weight_layout(config, TileRows(), context_tokens=64)
    assert why_not(config, layout, 232_448) is None
    assert why_not(replace(config, head_dim=256), layout, 232_448) is None
    assert "head_dim 256 needs 168960 bytes" in str(why_not(replace(config, head_dim=256), layout, 101_376))
    assert "head_dim is 66" in str(why_not(replace(config, head_dim=66), layout, 232_448))
    neurons = weight_layout(config, TileRows(), context_tokens=64, sparse=True)
    assert "packed as neurons" in str(why_not(config, neurons, 232_448))
    assert {variant.shared_bytes <= 101_376 for variant in usable_variants(101_376)} == {True}
    assert usable_variants(232_448) == VARIANTS


def test_it_is_taken_wherever_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, prompts go through PyTorch."""
    config = CONFIGS["llama"]
    whole = Whole.of(config, random_weights(config))
    monkeypatch.setattr(megakernel_load, "facts", lambda device: gpu())
    monkeypatch.setattr(megakernel_load, "load_kernel", lambda spec, device, cache: Recorder(spec, []))

    class Holder:
        packed, cache = whole.packed, whole.cache()

    holder: Any = Holder()
    assert isinstance(megakernel_load.prefill_kernels(holder, "cuda:0"), PackedPrefill)
    monkeypatch.setattr(megakernel_load, "facts", lambda device: gpu(shared_bytes_per_block=40_000))
    assert megakernel_load.prefill_kernels(holder, "cuda:0") is None


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("name", ["llama-dynamic", "qwen2"])
def test_answers_are_those_of_the_reference_however_the_prompt_is_cut(name: str, tmp_path: Any) -> None:
    """Through the backend: chunks of 16 tokens or one of 70, and tokens that the reference would choose too."""
    changes = {"max_position_embeddings": 32} if "dynamic" in name else {}
    checkpoint, config = checkpoint_of(name, tmp_path, **changes)
    plan, tokens, limit = small_plan(config), 70, 6
    packed, prompt = packed_of(checkpoint, plan), prompt_of(config, 70)
    megakernel = put_together(plan, packed, lambda spec: ShimKernel(spec, timeout_s=100.0))
    answers, steps = [], []
    for chunk_tokens in (16, 2048):
        megakernel.cache.pages.fill_(torch.nan)
        prefill = PackedPrefill(
            packed, megakernel.cache, ShimKernel, sms=3, variants=VARIANTS[:1], chunk_tokens=chunk_tokens
        )
        backend = MegakernelBackend(megakernel, memory=MemoryReport(0, 0, 0), prefill=prefill)
        sequence = backend.open(prompt, tokens + limit)
        assert isinstance(sequence, PagedSequence)
        seen: list[tuple[int, int]] = []
        backend.prefill(sequence, CancelToken(), lambda done, total, seen=seen: seen.append((done, total)))
        made = backend.decode(sequence, Sampling(), limit, frozenset(), CancelToken())
        answers.append([token.token_id for token in made])
        steps.append(seen)
        backend.release(sequence)
    assert answers[0] == answers[1]
    assert steps == [[(16, 69), (32, 69), (48, 69), (64, 69), (69, 69)], [(69, 69)]]
    reference = Reference(Model(config, weights_of(checkpoint, config)), context=tokens + limit)
    reference.check_greedy(prompt, answers[0])
