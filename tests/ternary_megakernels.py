"""Small ternary models on the megakernel, on the shim or a GPU, and what the reference makes of the same weights.

Between CTAs values travel as bf16. `HandedOver` is the reference that takes them so; the rest is the contract's, so
that phases can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from onekernel.config import ModelConfig, Ternary
from onekernel.device.kernel import Kernel
from onekernel.device.spec import KernelSpec
from onekernel.engine.megakernel import Megakernel
from onekernel.models.model import Activations, LayerWeights, Model, Phase, Place
from onekernel.models.packed import PackedModel, pack
from onekernel.models.ternary import TernaryWeights
from onekernel.phases.attention.cache import KVCache
from onekernel.phases.attention.rope import rope_table
from onekernel.phases.ternary import Int8Rows, TernaryReference
from onekernel.plan.abi import NO_PHASE, Kind
from onekernel.plan.plan import Plan
from onekernel.weights.ternary.int8_rows import quantise_rows
from onekernel.weights.ternary.matrix import TernaryMatrix
from tests.megakernels import published, put_together, wait

LOGITS = 0.1
"""Relative L2 of logits. Attention rounds its operands to bf16 on both sides in its own way, and what that moves over a
half makes another int8 value of the next product; a wrong scale or column is anywhere."""

BITNET = ModelConfig(
    architecture="bitnet",
    hidden_size=320,
    intermediate_size=700,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=203,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    hidden_act="relu2",
    tie_word_embeddings=True,
    sub_norms=True,
    ternary=Ternary(),
)
QWEN3 = replace(
    BITNET,
    architecture="qwen3",
    hidden_size=256,
    intermediate_size=384,
    head_dim=64,
    hidden_act="silu",
    sub_norms=False,
    qk_norm=True,
    ternary=Ternary(group=128),
)
CONFIGS: dict[str, ModelConfig] = {
    "bitnet": BITNET,
    "odd": replace(
        BITNET,
        hidden_size=102,
        intermediate_size=61,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=20,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "int8 head": replace(BITNET, ternary=Ternary(head="int8")),
    "llama": replace(BITNET, architecture="llama", hidden_act="silu", sub_norms=False, tie_word_embeddings=False),
    "groups of 128": QWEN3,
    "groups of 64": replace(
        QWEN3, hidden_size=192, intermediate_size=320, head_dim=48, ternary=Ternary(group=64, head="int8")
    ),
}


@cache
def random_weights(config: ModelConfig, seed: int = 0) -> TernaryWeights:
    """Weights on the CPU, every projection with a scale of its own, every group with another."""
    draw = torch.Generator().manual_seed(seed)
    group = None if config.ternary is None else config.ternary.group

    def matrix(rows: Sequence[int], columns: int, gain: float) -> TernaryReference:
        codes = torch.randint(-1, 2, (sum(rows), columns), generator=draw, dtype=torch.int8)
        shape = (len(rows),) if group is None else (sum(rows), columns // group)
        scales = (0.6 + 0.8 * torch.rand(shape, generator=draw)) * 1.2 * gain * columns**-0.5
        return TernaryReference(TernaryMatrix(codes, scales, tuple(rows) if group is None else (), group))

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=draw)

    def bias(size: int, there: bool) -> torch.Tensor | None:
        return (0.3 * torch.randn(size, generator=draw)).bfloat16() if there else None

    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(hidden),
            qkv=matrix((q, kv, kv), hidden, 1.5),
            qkv_bias=bias(q + 2 * kv, config.qkv_bias),
            q_norm=norm(config.head_dim) if config.qk_norm else None,
            k_norm=norm(config.head_dim) if config.qk_norm else None,
            out=matrix((hidden,), q, 0.7 if config.sub_norms else 2.0),
            out_bias=bias(hidden, config.o_bias),
            mlp_norm=norm(hidden),
            gate_up=matrix((inner, inner), hidden, 1.5),
            gate_up_bias=bias(2 * inner, config.mlp_bias),
            down=matrix((hidden,), inner, 0.7 if config.sub_norms else 1.5),
            down_bias=bias(hidden, config.mlp_bias),
            attention_sub_norm=norm(q) if config.sub_norms else None,
            mlp_sub_norm=norm(inner) if config.sub_norms else None,
        )
        for _ in range(config.num_hidden_layers)
    )
    embedding = torch.randn(config.vocab_size, hidden, generator=draw).bfloat16()
    dense = embedding if config.tie_word_embeddings else torch.randn(embedding.shape, generator=draw).bfloat16()
    int8 = config.ternary is not None and config.ternary.head == "int8"
    head = Int8Rows(*quantise_rows(dense)) if int8 else dense
    return TernaryWeights(embedding, layers, norm(hidden), head, torch.bfloat16)


class HandedOver(Model):
    """The reference, whose phases take what another one gave in bf16; the residual stays float32 with its owner."""

    def run(self, phase: Phase, acts: Activations, place: Place) -> None:
        """Run one phase on `acts`, in place."""
        taken = {"attention": "qkv", "out": "mixed", "down": "inner"}.get(phase.name)
        if taken is not None:
            setattr(acts, taken, getattr(acts, taken).bfloat16().float())
        residual = acts.residual
        if phase.name in ("qkv", "gate_up", "head"):
            acts.residual = residual.bfloat16().float()
        super().run(phase, acts, place)
        if phase.name in ("qkv", "gate_up", "head"):
            acts.residual = residual


@dataclass(frozen=True, slots=True)
class TernaryCase:
    """A model with weights on the CPU, and the same packed for a plan on a device."""

    config: ModelConfig
    weights: TernaryWeights
    plan: Plan
    packed: PackedModel

    @classmethod
    def of(cls, config: ModelConfig, plan: Plan, device: str = "cpu") -> TernaryCase:
        """Draw the weights and pack them."""
        weights = random_weights(config)
        packed = pack(weights, config, plan.layout)
        packed = replace(packed, arena=packed.arena.to(device), constants=packed.constants.to(device))
        return cls(config, weights, plan, packed)

    def megakernel(self, load: Callable[[KernelSpec], Kernel]) -> Megakernel:
        """A kernel for it, with a small ring."""
        return put_together(self.plan, self.packed, load)

    def filled(self, prompt: Sequence[int]) -> tuple[KVCache, torch.Tensor]:
        """The reference's cache before the prompt's last token, on the CPU, NaN elsewhere, and its scattered pages."""
        cache = KVCache.allocate(self.config, self.plan.limits.num_pages, torch.bfloat16, "cpu")
        cache.pages.fill_(float("nan"))
        table = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(4))
        table = table[: self.plan.limits.table_pages]
        if len(prompt) > 1:
            Model(self.config, self.weights).extend(prompt[:-1], Place(cache, table, self.rope, 0))
        return cache, table

    @property
    def rope(self) -> torch.Tensor:
        """The reference's table of rotations."""
        return rope_table(self.config, self.plan.limits.max_context)

    def launch(self, megakernel: Megakernel, prompt: Sequence[int], limit: int, stop_after: int = NO_PHASE) -> None:
        """Fill the kernel's cache and make up to `limit` tokens; raises DeviceError if the kernel was stopped."""
        cache, table = self.filled(prompt)
        megakernel.cache.pages.copy_(cache.pages)
        megakernel.logits.fill_(float("nan"))
        on_device = table.int()[None].contiguous().to(megakernel.device)
        megakernel.launch(prompt[-1:], [len(prompt) - 1], on_device, limit, want_logits=True, stop_after=stop_after)
        wait(megakernel)
        megakernel.check()

    def check_answer(self, megakernel: Megakernel, prompt: Sequence[int], limit: int) -> list[int]:
        """Demand the reference's tokens, but for ties within its rounding, and its last logits."""
        self.launch(megakernel, prompt, limit)
        slots = [megakernel.read(i) for i in range(limit)]
        tokens = [slot.token_id for slot in slots if slot is not None]
        assert len(tokens) == limit
        cache, table = self.filled(prompt)
        model, position = HandedOver(self.config, self.weights), len(prompt) - 1
        for token, chosen in zip([prompt[-1], *tokens], tokens, strict=False):
            want = model.logits([token], Place(cache, table, self.rope, position))[0]
            assert want.max() - want[chosen] <= 2 * LOGITS * want.std(), f"{chosen} at {position}"
            position += 1
        got = megakernel.logits[0, : self.config.vocab_size].cpu()
        error = float((got - want).norm() / want.norm())
        assert error < LOGITS, error
        return tokens

    def check_phases(self, megakernel: Megakernel, prompt: Sequence[int]) -> None:
        """Demand after every phase the bits that the reference makes of what that phase took.

        Not of attention and the head, whose products are of bf16, nor of SiLU, whose exponential is the device's.
        """
        cache, table = self.filled(prompt)
        model, place = HandedOver(self.config, self.weights), Place(cache, table, self.rope, len(prompt) - 1)
        acts, phases = model.start(prompt[-1:]), iter(model.phases)
        buffers = {Kind.QKV: ("qkv", "qkv"), Kind.COMBINE: ("mixed", "mixed"), Kind.GATE_UP: ("inner", "inner")}
        for phase in self.plan.phases:
            if phase.kind in (Kind.CHOOSE, Kind.ATTENTION):
                continue
            self.launch(megakernel, prompt, 1, stop_after=phase.index)
            model.run(next(phases), acts, place)
            if phase.kind == Kind.HEAD:
                assert acts.logits is not None
                got = megakernel.logits[:, : self.config.vocab_size].cpu()
                assert float((got - acts.logits).norm() / acts.logits.norm()) < LOGITS
                continue
            buffer, attribute = buffers.get(phase.kind, ("x", "residual"))
            value = getattr(acts, attribute)
            want, got = value[0].bfloat16().float(), published(megakernel, buffer, phase.index, value.shape[1])
            if phase.kind == Kind.COMBINE or (phase.kind == Kind.GATE_UP and self.config.hidden_act == "silu"):
                assert float((got - want).norm() / want.norm()) < 1e-2, phase
                setattr(acts, attribute, got[None])
            else:
                assert torch.equal(got, want), f"{phase}: {(got != want).sum()} of {len(want)} values differ"
