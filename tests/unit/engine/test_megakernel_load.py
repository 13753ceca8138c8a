"""When the megakernel is taken, what is said when it is not, and that weights come to the device once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel import LLM
from onekernel.config import ModelConfig, Sampling
from onekernel.engine.megakernel_load import plan_megakernel, warm_up
from onekernel.engine.memory import check_memory, plan_memory
from onekernel.engine.packed_prefill import CHUNK_TOKENS, workspace_bytes
from onekernel.engine.request import CancelToken
from onekernel.errors import ConfigError, DeviceError, MemoryLimitError, NumericError
from onekernel.models.load import load_packed, load_weights
from onekernel.models.model import Model, Place
from onekernel.models.packed import allocate, pack
from onekernel.models.packed_weights import PackedWeights, scratch_bytes
from onekernel.models.registry import model_config
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.weights.arena import TileRows, weight_layout
from onekernel.weights.open import open_checkpoint
from onekernel.weights.shipped import read_shipped
from tests.unit.device.fakes import H200
from tests.unit.plan.models import CONFIGS, random_weights

LLAMA, LLAMA_8B = (model_config(read_shipped(name)) for name in ("Llama-3.2-1B", "Llama-3.1-8B"))


def planned(config: ModelConfig = LLAMA, device: str = "cuda:0", dtype: torch.dtype = torch.bfloat16, **facts: Any):
    return plan_megakernel(config, device, dtype, 4096, config.vocab_size, lambda name: replace(H200, **facts))


def test_a_supported_gpu_gets_a_plan_for_all_its_processors() -> None:
    plan = planned().plan
    assert plan is not None
    assert (plan.limits.ctas, plan.limits.consumer_warps, plan.limits.num_pages) == (132, 16, 64)
    slice_of = planned(sm_count=32, mig=True).plan
    assert slice_of is not None and slice_of.limits.ctas == 32


def test_a_relu_gated_model_reads_only_neurons_that_fire_unless_told_not_to() -> None:
    relu = replace(LLAMA, hidden_act="relu")
    kinds = {}
    for sparse in ("auto", "on", "off"):
        found = plan_megakernel(relu, "cuda:0", torch.bfloat16, 4096, 1000, lambda name: H200, sparse=sparse)
        assert found.plan is not None
        kinds[sparse] = found.plan.layout.sparse
    assert kinds == {"auto": True, "on": True, "off": False}
    dense = planned().plan
    assert dense is not None and not dense.layout.sparse
    asked = plan_megakernel(LLAMA, "cuda:0", torch.bfloat16, 4096, 1000, lambda name: H200, sparse="on")
    assert asked.plan is None and "hidden_act is silu" in asked.reason


def test_what_sparse_feed_forwards_need_is_what_is_allocated() -> None:
    relu = replace(LLAMA, hidden_act="relu")
    plan = planned(relu).plan
    assert plan is not None
    needs = plan_memory(relu, torch.bfloat16, "cuda:0", 4096, plan)
    arenas = allocate(relu, plan.layout, "meta")
    assert needs.weights_bytes == arenas.arena.nbytes + arenas.constants.nbytes
    assert needs.weights_bytes < 1.02 * 2 * relu.parameters
    assert needs.workspace_bytes >= scratch_bytes(plan.layout) + 8 * plan.exchange_words


def test_little_shared_memory_gets_fewer_warps() -> None:
    plan = planned(LLAMA_8B, shared_bytes_per_block=101376).plan
    assert plan is not None
    assert plan.limits.consumer_warps == 8 and plan.shared.total_bytes <= 101376
    blackwell = planned(shared_bytes_per_block=101376, capability=(12, 0)).plan
    assert blackwell is not None and blackwell.limits.consumer_warps == 12


def test_a_model_whose_prompts_pytorch_computes_needs_an_unpacked_layer() -> None:
    """A head of 256 does not fit the prefill kernels on little shared memory, which the plan knows."""
    config = replace(LLAMA, head_dim=256, num_attention_heads=8, num_key_value_heads=2)
    workspaces = []
    for shared_bytes in (232_448, 101_376):
        plan = planned(config, shared_bytes_per_block=shared_bytes).plan
        assert plan is not None
        needs = plan_memory(config, torch.bfloat16, "cuda:0", 4096, plan, pages=16384)  # more than loading takes
        workspaces.append(needs.workspace_bytes - 8 * plan.exchange_words - plan.choice_bytes)
    assert workspaces[0] == workspace_bytes(config, plan.layout, CHUNK_TOKENS)
    assert workspaces[1] > scratch_bytes(plan.layout) > workspaces[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, "needs a GPU and the device is cpu"),
        ({"dtype": torch.float32}, "takes bfloat16 and the dtype is float32"),
        ({"capability": (8, 0)}, "compute capability 8.0"),
        ({"exec_timeout": True}, "display watchdog"),
        ({"config": replace(LLAMA, head_dim=66)}, "head_dim is 66"),
        ({"shared_bytes_per_block": 49152}, "shared memory of 49152 bytes"),
    ],
)
def test_where_it_cannot_run_there_is_a_reason(options: dict[str, Any], reason: str) -> None:
    found = planned(**options)
    assert found.plan is None and reason in found.reason


def test_a_model_beyond_the_plan_s_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*args: object, **options: object) -> None:
        raise OverflowError("4294967297 out of bounds for uint32")

    monkeypatch.setattr("onekernel.engine.megakernel_load.make_plan", overflow)
    assert "offsets have 32 bits: 4294967297" in planned().reason


def test_asking_for_it_where_it_cannot_run_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match=r"megakernel is not possible: .*device is cpu.*--backend auto"):
        LLM("SmolLM2-135M", load_format="dummy", device="cpu", backend="megakernel")


@pytest.mark.complaint(
    "C1", file="engine/memory.py", old="layout.total_bytes + 4 * constants", new="layout.total_bytes"
)
def test_needs_are_what_is_allocated() -> None:
    """For Qwen3-0.6B at 4,096 tokens, on torch's meta device; the arenas are the weights' only copy."""
    config = model_config(read_shipped("Qwen3-0.6B"))
    plan = planned(config).plan
    assert plan is not None
    needs = plan_memory(config, torch.bfloat16, "cuda:0", 4096, plan)
    arenas = allocate(config, plan.layout, "meta")
    assert needs.weights_bytes == arenas.arena.nbytes + arenas.constants.nbytes
    assert needs.kv_bytes == KVCache.allocate(config, plan.limits.num_pages, torch.bfloat16, "meta").pages.nbytes
    assert needs.weights_bytes < 1.02 * 2 * config.parameters
    activations = workspace_bytes(config, plan.layout, CHUNK_TOKENS)
    assert needs.workspace_bytes >= activations + 8 * plan.exchange_words
    free = needs.total_bytes - needs.kv_bytes // 2
    with pytest.raises(MemoryLimitError, match="--ctx-size") as caught:
        check_memory(config, torch.bfloat16, "cuda:0", 4096, free, plan)
    largest = caught.value.largest_context
    assert 0 < largest < 4096
    assert check_memory(config, torch.bfloat16, "cuda:0", largest, free, plan).total_bytes <= free


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_go_from_the_files_to_their_packed_place(tied: bool, tmp_path: Path) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 72,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": tied,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    config = model_config(checkpoint.settings.config)
    layout = weight_layout(config, TileRows(), context_tokens=64)
    seen: list[tuple[int, int]] = []
    packed = load_packed(checkpoint, config, layout, device="cpu", progress=lambda *step: seen.append(step))
    weights = load_weights(checkpoint, config, dtype=torch.bfloat16, device="cpu", progress=lambda *step: None)
    wanted = pack(weights, config, layout)
    for key in layout.matrices:
        assert torch.equal(packed.matrix(*key), wanted.matrix(*key))
    ids = torch.arange(config.vocab_size)
    assert torch.equal(packed.embedding_rows(ids), wanted.embedding_rows(ids))
    assert torch.equal(packed.constants, wanted.constants)
    assert seen == [(n, len(checkpoint.tensors)) for n in range(1, len(seen))] + [(len(checkpoint.tensors),) * 2]


@pytest.mark.parametrize("tiles", [TileRows(), TileRows(4, 4, 4, 4)], ids=["8", "4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_the_same_from_packed_weights(name: str, tiles: TileRows) -> None:
    """Bit for bit, in prefill and token by token: the values are the same and so are the phases."""
    config, weights = CONFIGS[name], random_weights(CONFIGS[name])
    packed = pack(weights, config, weight_layout(config, tiles, context_tokens=128))
    ids = torch.randint(config.vocab_size, (70,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(model: Model, rope: torch.Tensor) -> torch.Tensor:
        cache = KVCache.allocate(config, 2, torch.bfloat16, "cpu")
        model.extend(ids[:66], Place(cache, torch.tensor([1, 0]), rope, 0))
        rows = [model.logits(ids[66:69], Place(cache, torch.tensor([1, 0]), rope, 66))]
        return torch.cat([*rows, model.logits(ids[69:], Place(cache, torch.tensor([1, 0]), rope, 69))])

    got = logits(Model(config, PackedWeights(packed)), packed.rope)
    assert torch.equal(got, logits(Model(config, weights), rope_table(config, 128)))


def test_layers_share_their_memory() -> None:
    config, weights = CONFIGS["llama"], random_weights(CONFIGS["llama"])
    packed = pack(weights, config, weight_layout(config, TileRows(), context_tokens=64))
    layers = PackedWeights(packed).layers
    assert len(layers) == len(list(layers)) == config.num_hidden_layers
    first = layers[0].down.data_ptr()
    assert layers[0] is layers[0]
    assert layers[1].down.data_ptr() == first
    assert torch.equal(layers[1].down, weights.layers[1].down)
    with pytest.raises(IndexError):
        layers[config.num_hidden_layers]
    with pytest.raises(TypeError):
        layers[:1]


class Scripted:
    """A backend for the warm-up."""

    max_context = 64

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.samplings, self.open_sequences = error, [], 0

    def open(self, prompt: Any, total_tokens: int) -> None:
        self.open_sequences += 1

    def prefill(self, *args: Any) -> None:
        pass

    def decode(self, sequence: Any, sampling: Sampling, limit: int, stop_ids: Any, cancel: CancelToken):
        self.samplings.append(sampling)
        if self.error:
            raise self.error
        yield from range(limit)

    def release(self, sequence: Any) -> None:
        self.open_sequences -= 1


def test_the_warm_up_goes_both_ways_and_leaves_bad_weights_to_their_user() -> None:
    backend = Scripted()
    warm_up(backend)  # type: ignore[arg-type]
    assert [sampling.greedy for sampling in backend.samplings] == [True, False]
    broken = Scripted(NumericError("NaN"))
    warm_up(broken)  # type: ignore[arg-type]
    assert broken.open_sequences == backend.open_sequences == 0
    with pytest.raises(DeviceError):
        warm_up(Scripted(DeviceError("no")))  # type: ignore[arg-type]
    tiny = Scripted()
    tiny.max_context = 4
    warm_up(tiny)  # type: ignore[arg-type]
    assert tiny.samplings == []
