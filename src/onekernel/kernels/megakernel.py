"""The spec of megakernel.cu: what is compiled in, and the parameters of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from onekernel.config import ModelConfig
from onekernel.device.spec import KernelSpec, Pointer, Scalar, Struct
from onekernel.device.watch import PARAMS as WATCH_PARAMS

HEADER_BYTES = 192
"""Of the plan's header, `plan.abi.HEADER`."""

_ACTIVATIONS = {"silu": 0, "relu": 1, "relu2": 2}


def consumer_warps(arch: str, sequences: int) -> int:
    """Return how many warps of a CTA compute: as many as leave each thread the registers it needs without spilling.

    Sixteen hide the most latency; with the producer's they leave 96 registers a thread, which is just enough for one
    sequence on Hopper.
    """
    if sequences > 1:
        return 8
    return 16 if arch.startswith("sm_90") else 12


@dataclass(frozen=True, slots=True)
class MegakernelShape:
    """What a build depends on: the model's head and activation, and how a CTA is made up. Nothing of a plan."""

    head_dim: int
    group: int
    hidden_act: str
    qk_norm: bool
    sequences: int
    warps: int
    stages: int
    ternary: bool = False
    scale_group: int = 0
    """Columns that share a scale, 64 or 128; 0: all."""
    head_int8: bool = False
    traced: bool = False
    """Whether the kernel writes down where a token's time goes."""
    sparse: bool = False
    """Whether the feed-forwards read only the neurons that fire."""

    @classmethod
    def of(
        cls, config: ModelConfig, *, sequences: int, warps: int, stages: int, sparse: bool = False
    ) -> MegakernelShape:
        """Return the shape for a model."""
        group = config.num_attention_heads // config.num_key_value_heads
        ternary = config.ternary
        return cls(
            config.head_dim,
            group,
            config.hidden_act,
            config.qk_norm,
            sequences,
            warps,
            stages,
            ternary is not None,
            ternary.group or 0 if ternary is not None else 0,
            ternary is not None and ternary.head == "int8",
            sparse=sparse,
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA: the computing warps and the one that loads."""
        return (self.warps + 1) * 32

    def spec(self, arch: str = "sm_90a") -> KernelSpec:
        """Return the kernel for this shape."""
        return KernelSpec(
            file="megakernel.cu",
            entry="megakernel",
            constants={
                "MK_HEAD_DIM": self.head_dim,
                "MK_GROUP": self.group,
                "MK_ACTIVATION": _ACTIVATIONS[self.hidden_act],
                "MK_QK_NORM": int(self.qk_norm),
                "MK_SEQUENCES": self.sequences,
                "MK_WARPS": self.warps,
                "MK_STAGES": self.stages,
                "MK_TERNARY": int(self.ternary),
                "MK_SCALE_GROUP": self.scale_group,
                "MK_HEAD_INT8": int(self.head_int8),
                "MK_TRACE": int(self.traced),
                "MK_SPARSE": int(self.sparse),
            },
            arch=arch,
            params=(
                Struct("header", HEADER_BYTES),
                Pointer("tasks", "uint8", ("task_bytes",)),
                Pointer("weights", "uint8", ("weight_bytes",)),
                Pointer("constants", "float32", ("floats",)),
                Pointer("pages", "bfloat16", ("layers", "pages", "kv_heads", 2, 64, "head_dim")),
                Pointer("page_table", "int32", ("sequences", "table_pages")),
                Pointer("exchange", "int64", ("words",)),
                Pointer("first_tokens", "int32", ("sequences",)),
                Pointer("positions", "int32", ("sequences",)),
                Pointer("stop_ids", "int32", ("stop_room",)),
                Scalar("stop_count", "u32"),
                Scalar("limit", "u32"),
                Pointer("slots", "int64", ("slot_room", "sequences"), pinned=True),
                Pointer("cancel", "int32", (1,), pinned=True, align_bytes=4),
                Pointer("logits", "float32", ("sequences", "vocab")),
                Scalar("logit_stride", "u32"),
                Scalar("stop_after", "u32"),
                Scalar("short_window", "u32"),
                Scalar("long_window", "u32"),
                Scalar("long_phase", "u32"),
                Scalar("deep_window", "u32"),
                Scalar("deep_phase", "u32"),
                Scalar("deep_from", "u32"),
                Scalar("lead", "u32"),
                Scalar("pace", "u32"),
                Pointer("trace", "int64", ("ctas", 2, "trace_room")),
                Scalar("trace_room", "u32"),
                Scalar("trace_token", "u32"),
                Scalar("mode", "u32"),
                Pointer("sampling", "uint8", ("sampling_bytes",)),
                Pointer("counts", "int32", ("sequences", "vocab")),
                Pointer("bias", "float32", ("sequences", "vocab")),
                Pointer("allowed", "int32", ("sequences", "allowed_words")),
                Pointer("scores", "float32", ("sequences", "vocab")),
                Pointer("choice", "int64", ("sequences", "choice_words")),
                Pointer("reports", "int64", ("slot_room", "sequences", "report_words"), pinned=True),
                *WATCH_PARAMS,
            ),
        )
