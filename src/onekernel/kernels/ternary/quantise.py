"""The kernel that norms and quantises activations: quantise.cu."""

from __future__ import annotations

from dataclasses import dataclass

from onekernel.device.spec import KernelSpec, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class QuantiseShape:
    """What a build depends on."""

    bf16: bool
    norm: bool
    ordered: bool = False
    """Whether values stand in the order of wgmma.cu, in whole units, with their sum beside; float32 fours only."""
    threads: int = 512

    @property
    def shared_bytes(self) -> int:
        """Partial sums of squares, and a float for each warp."""
        return (128 + self.threads // 32) * 4

    def spec(self) -> KernelSpec:
        """Return the kernel for this shape."""
        return KernelSpec(
            file="ternary/quantise.cu",
            entry="ternary_quantise",
            constants={
                "QUANTISE_THREADS": self.threads,
                "QUANTISE_BF16": int(self.bf16),
                "QUANTISE_NORM": int(self.norm),
                "QUANTISE_ORDERED": int(self.ordered),
            },
            params=(
                Pointer("x", "bfloat16" if self.bf16 else "float32", ("tokens", "columns")),
                Pointer("weight", "float32", ("weights",)),
                Pointer("q", "int8", ("tokens", "width")),
                Pointer("inverse", "float32", ("tokens",)),
                Pointer("sums", "int32", ("tokens",)),
                Scalar("columns", "u32"),
                Scalar("width", "u32"),
                Scalar("eps", "f32"),
            ),
        )
