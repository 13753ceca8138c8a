"""Whether a model can run on the megakernel, and the steps from its packed weights to a backend that is warm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from onekernel.config import MAX_TOP_LOGPROBS, ModelConfig, Sampling, SparseChoice
from onekernel.device.cache import KernelCache, default_cache
from onekernel.device.cuda_kernel import CudaKernel, load_kernel
from onekernel.device.facts import DeviceFacts, facts
from onekernel.device.spec import KernelSpec
from onekernel.device.support import architecture, check_supported
from onekernel.engine import ternary_prefill
from onekernel.engine.chunk_prefill import ChunkPrefill
from onekernel.engine.megakernel import Megakernel
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.memory import pages_for
from onekernel.engine.packed_prefill import PackedPrefill, usable_variants, why_not
from onekernel.engine.request import CancelToken
from onekernel.errors import ConfigError, DeviceError, NumericError
from onekernel.kernels.megakernel import MegakernelShape, consumer_warps
from onekernel.models.packed import PackedModel
from onekernel.phases.attention.cache import KVCache
from onekernel.plan.limits import Limits
from onekernel.plan.plan import ASSUMED_ACTIVE_FRACTION, Plan, make_plan, why_not_sparse
from onekernel.weights.arena import UNIT_BYTES

FEWEST_WARPS = 8
"""Computing warps of a CTA where shared memory has no room for more."""
_SMALL_LAYER_WARPS = 12
_SMALL_LAYER_PARAMETERS = 50_000
"""Of a CTA. Below, twelve warps are faster than sixteen: what each does once a phase costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for a model on a device, or why there is none."""

    plan: Plan | None
    reason: str = ""


def plan_megakernel(
    config: ModelConfig,
    device: str,
    dtype: torch.dtype,
    context: int,
    vocab_limit: int,
    read: Callable[[str], DeviceFacts] = facts,
    sparse: SparseChoice = "auto",
) -> Planned:
    """Plan the model for a device, before anything is allocated there; never raises for what cannot be planned.

    `sparse` says whether feed-forwards read only the neurons that fire; "auto": where the model's activation allows it.
    """
    if not device.startswith("cuda"):
        return Planned(None, f"the megakernel needs a GPU and the device is {device}")
    if dtype is not torch.bfloat16:
        return Planned(None, f"the megakernel takes bfloat16 and the dtype is {str(dtype).removeprefix('torch.')}")
    try:
        found = read(device)
        check_supported(found)
        limits = Limits(
            ctas=found.sm_count,
            max_context=context,
            num_pages=pages_for(context),
            shared_bytes=found.shared_bytes_per_block,
        )
        return Planned(first_plan(config, limits, architecture(found), vocab_limit, sparse))
    except (DeviceError, ConfigError) as error:
        return Planned(None, str(error))


def first_plan(
    config: ModelConfig,
    limits: Limits,
    arch: str,
    vocab_limit: int | None = None,
    sparse: SparseChoice = "auto",
    active_fraction: float = ASSUMED_ACTIVE_FRACTION,
) -> Plan:
    """Return the plan with the most consumer warps, whatever `limits` says of them, sparse before dense.

    `active_fraction`: of the neurons of sparse feed-forwards, those taken to fire. Raises the ConfigError of the last
    try.
    """
    fractions: list[float | None] = []
    if sparse == "on" or (sparse == "auto" and why_not_sparse(config) is None):
        fractions.append(active_fraction)
    if sparse != "on":
        fractions.append(None)
    warps = consumer_warps(arch, limits.sequences)
    if config.ternary is None and config.layer_parameters <= _SMALL_LAYER_PARAMETERS * limits.ctas:
        warps = min(warps, _SMALL_LAYER_WARPS)
    warp_counts = dict.fromkeys((warps, FEWEST_WARPS))
    for fraction, warps in itertools.product(fractions, warp_counts):
        tried = replace(limits, consumer_warps=warps, stage_bytes=warps * UNIT_BYTES)
        try:
            return make_plan(config, tried, vocab_limit=vocab_limit, active_fraction=fraction)
        except ConfigError as error:
            refused = error
        except OverflowError as error:
            raise ConfigError(f"the model is too large for a plan, whose offsets have 32 bits: {error}") from None
    raise refused


def assemble(
    plan: Plan, packed: PackedModel, device: str, note: Callable[[str], None], cache: KernelCache | None = None
) -> Megakernel:
    """Put a plan, its packed weights and a kernel for `device` together, with a cache of the plan's pages."""
    limits, cache = plan.limits, cache or default_cache()
    shape = MegakernelShape.of(
        plan.config,
        sequences=limits.sequences,
        warps=limits.consumer_warps,
        stages=plan.shared.stages,
        sparse=plan.layout.sparse,
    )
    spec = shape.spec(architecture(facts(device)))
    if not cache.holds(spec):
        note(f"compiling the kernel, once: models of this shape will find it in {cache.root}")
    kernel = load_kernel(spec, device, cache)
    pages = KVCache.allocate(plan.config, limits.num_pages, torch.bfloat16, device)
    return Megakernel(plan, packed, pages, kernel, shape)


def traced(megakernel: Megakernel, device: str, cache: KernelCache | None = None) -> Megakernel:
    """Return the same megakernel, on the same weights and pages, built to write down where its time goes."""
    shape = replace(megakernel.shape, traced=True)
    kernel = load_kernel(shape.spec(architecture(facts(device))), device, cache or default_cache())
    return Megakernel(megakernel.plan, megakernel.packed, megakernel.cache, kernel, shape)


def prefill_kernels(megakernel: Megakernel, device: str, cache: KernelCache | None = None) -> ChunkPrefill | None:
    """Return the kernels that compute prompts, or None for what they cannot take, where PyTorch does; see `why_not`."""
    packed, found = megakernel.packed, facts(device)
    shared_bytes = found.shared_bytes_per_block

    def load(spec: KernelSpec) -> CudaKernel:
        return load_kernel(spec, device, cache)

    if ternary_prefill.why_not(packed.config, packed.layout, shared_bytes) is None:
        wgmma = found.capability == (9, 0)
        return ternary_prefill.TernaryPrefill(packed, megakernel.cache, load, sms=found.sm_count, wgmma=wgmma)
    if why_not(packed.config, packed.layout, shared_bytes) is not None:
        return None
    variants = usable_variants(shared_bytes)
    return PackedPrefill(packed, megakernel.cache, load, sms=found.sm_count, variants=variants)


def warm_up(backend: MegakernelBackend, prompt: Sequence[int] = (0, 0, 0)) -> None:
    """Answer once greedily and once with all that sampling has, so that no request waits for a first time."""
    tokens = 2
    if len(prompt) + tokens > backend.max_context:
        return
    everything = Sampling(
        temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=MAX_TOP_LOGPROBS
    )
    for sampling in (Sampling(), everything):
        sequence = backend.open(prompt, len(prompt) + tokens)
        try:
            backend.prefill(sequence, CancelToken(), lambda done, total: None)
            with closing(backend.decode(sequence, sampling, tokens, frozenset(), CancelToken())) as answer:
                for _ in answer:
                    pass
        except NumericError:
            continue  # a request will say what is wrong with the weights
        finally:
            backend.release(sequence)
