"""Every kernel of the package with representative constants: what the compile tests build for each architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onekernel.device.spec import KernelSpec, Pointer, Scalar
from onekernel.kernels.machine import READ_ALL, cluster_hop
from onekernel.kernels.megakernel import MegakernelShape
from onekernel.kernels.prefill import specs as prefill
from onekernel.kernels.prefill.variants import VARIANTS
from onekernel.kernels.ring import RingShape
from onekernel.kernels.sparse_ffn import SparseShape
from onekernel.kernels.sparse_training import TrainingShape
from onekernel.kernels.ternary.prefill import CANDIDATES, WITH_GROUPS
from onekernel.kernels.ternary.product import ProductShape
from onekernel.kernels.ternary.quantise import QuantiseShape
from onekernel.kernels.ternary.wgmma import ORDER, wgmma_shapes

AMPERE_AND_UP = ("sm_80", "sm_90a", "sm_100", "sm_120")
"""For kernels with plain instructions only."""

OPERATORS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""For what must run wherever an operator does."""

HOPPER_AND_UP = ("sm_90a", "sm_100", "sm_120")
"""For kernels with bulk copies, mbarriers or clusters."""

HOPPER_ONLY = ("sm_90a",)
"""For kernels with wgmma or setmaxnreg."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A kernel and the architectures it must compile for, without spills and without stack."""

    spec: KernelSpec
    architectures: tuple[str, ...] = HOPPER_AND_UP

    def for_arch(self, arch: str) -> KernelSpec:
        """Return the spec for another architecture."""
        return replace(self.spec, arch=arch)


SELFCHECK = KernelSpec(
    file="selfcheck.cu",
    entry="selfcheck",
    constants={"THREADS": 256},
    params=(
        Pointer("x", "float32", ("n",)),
        Pointer("y", "float32", ("n",)),
        Pointer("out", "float32", ("n",)),
        Pointer("elements", "int32", ("ctas",)),
        Pointer("place", "int32", ("ctas",)),
        Scalar("n"),
        Scalar("ctas"),
        Scalar("scale", "f32"),
    ),
)

LLAMA_1B = MegakernelShape(head_dim=64, group=4, hidden_act="silu", qk_norm=False, sequences=1, warps=16, stages=12)
SPARSE_1B = replace(LLAMA_1B, hidden_act="relu", sparse=True, stages=12)
QWEN3_0_6B = replace(LLAMA_1B, head_dim=128, group=2, qk_norm=True)
BITNET_2B = replace(LLAMA_1B, head_dim=128, hidden_act="relu2", ternary=True, stages=10)
SPARSE = SparseShape()
TRAINING = TrainingShape(2048)

KERNELS: dict[str, Registered] = {
    "selfcheck": Registered(SELFCHECK),
    "ring": Registered(RingShape().spec()),
    "read_all": Registered(READ_ALL, AMPERE_AND_UP),
    "cluster_hop_tagged": Registered(cluster_hop("cluster_hop_tagged")),
    "cluster_hop_async": Registered(cluster_hop("cluster_hop_async")),
    "megakernel_llama_1b": Registered(LLAMA_1B.spec(), HOPPER_ONLY),
    "megakernel_llama_1b_12_warps": Registered(replace(LLAMA_1B, warps=12).spec()),
    "megakernel_qwen3_0_6b": Registered(QWEN3_0_6B.spec(), HOPPER_ONLY),
    "megakernel_qwen3_0_6b_12_warps": Registered(replace(QWEN3_0_6B, warps=12).spec()),
    "megakernel_sparse_1b": Registered(SPARSE_1B.spec(), HOPPER_ONLY),
    "megakernel_sparse_1b_12_warps": Registered(replace(SPARSE_1B, warps=12).spec()),
    "megakernel_sequences_8": Registered(replace(LLAMA_1B, sequences=8, warps=8).spec()),
    "megakernel_bitnet_2b": Registered(BITNET_2B.spec(), HOPPER_ONLY),
    "megakernel_bitnet_2b_12_warps": Registered(replace(BITNET_2B, warps=12).spec()),
    "megakernel_bitnet_2b_int8": Registered(replace(BITNET_2B, head_int8=True).spec(), HOPPER_ONLY),
    "megakernel_ternary_qwen3": Registered(replace(QWEN3_0_6B, ternary=True, scale_group=128).spec(), HOPPER_ONLY),
    "sparse_pack": Registered(SPARSE.pack(), AMPERE_AND_UP),
    "sparse_up": Registered(SPARSE.up(), AMPERE_AND_UP),
    "sparse_combine": Registered(SPARSE.combine(), AMPERE_AND_UP),
    "sparse_down_16": Registered(SPARSE.down(16), AMPERE_AND_UP),
    "sparse_down_8": Registered(SPARSE.down(8), AMPERE_AND_UP),
    "sparse_gather": Registered(SPARSE.gather(), AMPERE_AND_UP),
    "sparse_gated": Registered(SPARSE.product(), AMPERE_AND_UP),
    "sparse_train_masks": Registered(TRAINING.masks(), OPERATORS),
    "sparse_train_hot_forward": Registered(TRAINING.hot_forward(), OPERATORS),
    "sparse_train_hot_backward": Registered(TRAINING.hot_backward(), OPERATORS),
    "sparse_train_transpose": Registered(TRAINING.transpose(), OPERATORS),
    "sparse_train_forward": Registered(TRAINING.forward(4), OPERATORS),
    "sparse_train_tokens": Registered(TRAINING.backward_tokens(4), AMPERE_AND_UP),
    "sparse_train_tokens_2": Registered(TRAINING.backward_tokens(2), OPERATORS),
    "sparse_train_weights": Registered(TRAINING.weight_gradients(4), OPERATORS),
    "sparse_train_weights_float": Registered(
        replace(TRAINING, hidden=8192, float_gradients=True).weight_gradients(2), HOPPER_AND_UP
    ),
    "prefill_embed": Registered(prefill.EMBED, AMPERE_AND_UP),
    "prefill_norm": Registered(prefill.NORM, AMPERE_AND_UP),
    "prefill_append": Registered(prefill.append(128, qk_norm=True), AMPERE_AND_UP),
    "prefill_attention_64": Registered(prefill.attention(64), HOPPER_ONLY),
    "prefill_attention_128": Registered(prefill.attention(128), HOPPER_ONLY),
    "prefill_attention_128_float": Registered(prefill.attention(128, "float32"), HOPPER_ONLY),
    "prefill_attention_256": Registered(prefill.attention(256), HOPPER_ONLY),
    **{f"prefill_product_{v.name}": Registered(prefill.product(v, 8), HOPPER_ONLY) for v in VARIANTS},
    "prefill_product_128x256_rows_4": Registered(prefill.product(VARIANTS[-1], 4), HOPPER_ONLY),
    "ternary_decode_1": Registered(ProductShape("tensor_core", 1, bf16=True).spec(), AMPERE_AND_UP),
    "ternary_decode_28_warps": Registered(
        ProductShape("tensor_core", 1, bf16=True, warps=28, split=4, stages=3).spec(), AMPERE_AND_UP
    ),
    "ternary_decode_8_groups": Registered(ProductShape("tensor_core", 8, group=64).spec(), ("sm_80", "sm_90a")),
    "ternary_blocks_1": Registered(ProductShape("blocks16x32", 1, bf16=True).spec(), OPERATORS),
    "ternary_blocks_8": Registered(ProductShape("blocks16x32", 8).spec(), ("sm_80", "sm_90")),
    "ternary_prefill": Registered(replace(CANDIDATES[0], bf16=True).spec(), ("sm_80", "sm_90a")),
    "ternary_prefill_small": Registered(replace(CANDIDATES[2], bf16=True).spec(), ("sm_80", "sm_90a")),
    "ternary_prefill_groups": Registered(replace(WITH_GROUPS, group=64).spec(), HOPPER_ONLY),
    **{
        f"ternary_wgmma_{shape.rows}x{shape.tokens}": Registered(shape.spec(), HOPPER_ONLY)
        for shape in wgmma_shapes(bf16=True)
    },
    "ternary_order": Registered(ORDER, HOPPER_ONLY),
    "ternary_quantise": Registered(QuantiseShape(bf16=True, norm=True).spec(), AMPERE_AND_UP),
    "ternary_quantise_ordered": Registered(QuantiseShape(bf16=False, norm=True, ordered=True).spec(), HOPPER_ONLY),
}
