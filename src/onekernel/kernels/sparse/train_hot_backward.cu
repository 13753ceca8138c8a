// Between the dense products of the hot neurons, backward: h, and the gradients of x . gate and x . up.
//
// Constants: HOT_WARPS, TRAIN_GATED, TRAIN_SQUARE.
#include "sparse/gradients.cuh"

extern "C" __global__ void __launch_bounds__(HOT_WARPS * 32)
    train_hot_backward(const uint4* first,  // (tokens, hots) bf16: x . gate, without a gate x . up
                       uint4* grads,        // (tokens, width) bf16: of x . gate, then of x . up, which was here before
                       uint4* inner,        // (tokens, hots) bf16: grad_out . down; h takes its place
                       const float* l1,     // (1,): the gradient of the sum of all |h|
                       u32 tokens, u32 hots, u32 width) {  // width: 2 * hots, without a gate hots
  const u32 vectors = hots / 8, stride = width / 8;
  const u64 all = static_cast<u64>(tokens) * vectors, step = static_cast<u64>(gridDim.x) * HOT_WARPS * WARP;
  const float penalty = *l1;
  for (u64 at = static_cast<u64>(blockIdx.x) * HOT_WARPS * WARP + threadIdx.x; at < all; at += step) {
    uint4* gate_place = grads + at / vectors * stride + at % vectors;
    uint4* up_place = gate_place + (TRAIN_GATED ? vectors : 0);
    const uint4 a = first[at], b = TRAIN_GATED ? *up_place : a, c = inner[at];
    u32 gate[4], up[4], h[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      Active two[2];
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 i = 2 * k + half;
        two[half] = Active{0.0f, 0.0f, 0.0f};
        if (kept(half_of(a, i)))
          two[half] = gradients_of<TRAIN_GATED, TRAIN_SQUARE>(__uint_as_float(half_of(a, i) << 16),
                                                              __uint_as_float(half_of(b, i) << 16),
                                                              __uint_as_float(half_of(c, i) << 16), penalty);
      }
      gate[k] = bf16_pair(two[0].gate, two[1].gate);
      up[k] = bf16_pair(two[0].up, two[1].up);
      h[k] = bf16_pair(two[0].inner, two[1].inner);
    }
    if constexpr (TRAIN_GATED) *gate_place = make_uint4(gate[0], gate[1], gate[2], gate[3]);
    *up_place = make_uint4(up[0], up[1], up[2], up[3]);
    inner[at] = make_uint4(h[0], h[1], h[2], h[3]);
  }
}
