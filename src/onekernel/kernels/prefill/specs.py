"""What the prefill kernels take: one spec each, and how much shared memory their CTAs need."""

from __future__ import annotations

from typing import Literal

from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.kernels.prefill.variants import Variant

EMBED_THREADS = NORM_THREADS = APPEND_THREADS = 256
ATTENTION_THREADS = 128
APPEND_VECTORS = 8
"""Heads of tokens that a CTA of append.cu does."""
ATTENTION_QUERIES = 64
"""Queries of a CTA of attention.cu."""
NORM_SHARED_BYTES = 32

RESULTS = {"store": 0, "add": 1, "silu": 2, "relu": 3, "relu2": 4}
"""What a product does with its sums: keep them, add them to the residual, or activation(gate) * up."""

EMBED = KernelSpec(
    file="prefill/embed.cu",
    entry="prefill_embed",
    params=(
        Pointer("token_ids", "int32", ("room",)),
        Pointer("weights", "uint8", ("weight_bytes",)),
        Scalar("offset", "u64"),
        Scalar("tile_rows", "u32"),
        Scalar("k_units", "u32"),
        Scalar("hidden", "u32"),
        Pointer("residual", "float32", ("residual_room", "columns")),
        Scalar("columns", "u32"),
    ),
)

NORM = KernelSpec(
    file="prefill/norm.cu",
    entry="prefill_norm",
    params=(
        Pointer("residual", "float32", ("residual_room", "columns")),
        Scalar("columns", "u32"),
        Scalar("hidden", "u32"),
        Pointer("constants", "float32", ("floats",)),
        Scalar("weight", "u32"),
        Scalar("eps", "f32"),
        Pointer("out", "bfloat16", ("out_room", "out_columns")),
        Scalar("out_columns", "u32"),
    ),
)


def product(variant: Variant, tile_rows: int) -> KernelSpec:
    """Return a variant of the product for weights in units of 4 or 8 rows."""
    return KernelSpec(
        file="prefill/product.cu",
        entry="prefill_product",
        constants={
            "PF_TOKENS": variant.tokens,
            "PF_ROWS": variant.rows,
            "PF_WARPS_M": variant.warps_m,
            "PF_WARPS_N": variant.warps_n,
            "PF_K_UNITS": variant.k_units,
            "PF_STAGES": variant.stages,
            "PF_CTAS_PER_SM": variant.ctas_per_sm,
            "PF_ROWS_4": int(tile_rows == 4),
        },
        params=(
            Pointer("x", "bfloat16", ("x_room", "columns")),
            Scalar("columns", "u32"),
            Scalar("tokens", "u32"),
            Pointer("weights", "uint8", ("weight_bytes",)),
            Scalar("offset", "u64"),
            Scalar("k_units", "u32"),
            Scalar("row_tiles", "u32"),
            Pointer("constants", "float32", ("floats",)),
            Scalar("bias", "u32"),
            Scalar("result", "u32"),
            Pointer("rows", "float32", ("rows_room", "rows_columns")),
            Scalar("rows_columns", "u32"),
            Pointer("inner", "bfloat16", ("inner_room", "inner_columns")),
            Scalar("inner_columns", "u32"),
        ),
    )


def append(head_dim: int, qk_norm: bool) -> KernelSpec:
    """Return QK-norm, RoPE and the append to the cache for heads of this size."""
    return KernelSpec(
        file="prefill/append.cu",
        entry="prefill_append",
        constants={"PF_HEAD_DIM": head_dim, "PF_QK_NORM": int(qk_norm)},
        params=(
            Pointer("qkv", "float32", ("qkv_room", "columns")),
            Scalar("columns", "u32"),
            Scalar("tokens", "u32"),
            Scalar("start", "u32"),
            Scalar("heads", "u32"),
            Scalar("kv_heads", "u32"),
            Pointer("constants", "float32", ("floats",)),
            Scalar("rope", "u32"),
            Scalar("q_norm", "u32"),
            Scalar("k_norm", "u32"),
            Scalar("eps", "f32"),
            Pointer("page_table", "int32", ("table_pages",)),
            Pointer("pages", "bfloat16", ("pages", "kv_heads", 2, 64, head_dim)),
            Pointer("queries", "bfloat16", ("q_room", "heads", head_dim)),
        ),
    )


def attention(head_dim: int, mixed: Literal["bfloat16", "float32"] = "bfloat16") -> KernelSpec:
    """Return causal attention over the pages for heads of this size, a multiple of 4, with results in this dtype."""
    return KernelSpec(
        file="prefill/attention.cu",
        entry="prefill_attention",
        constants={"PF_HEAD_DIM": head_dim, "PF_MIXED_FLOAT": int(mixed == "float32")},
        params=(
            Pointer("queries", "bfloat16", ("q_room", "heads", head_dim)),
            Scalar("heads", "u32"),
            Scalar("tokens", "u32"),
            Scalar("start", "u32"),
            Scalar("scale", "f32"),
            Pointer("page_table", "int32", ("table_pages",)),
            Pointer("pages", "bfloat16", ("pages", "kv_heads", 2, 64, head_dim)),
            Scalar("kv_heads", "u32"),
            Pointer("mixed", mixed, ("mixed_room", "columns")),
            Scalar("columns", "u32"),
        ),
    )


def attention_shared_bytes(head_dim: int) -> int:
    """Return the dynamic shared memory of a CTA of attention.cu: queries, and two pages of keys and values."""
    row = -(-head_dim // 16) * 16 + 8
    return 5 * 64 * row * 2
