// Between the dense products of the hot neurons, forward: h = activate(gate) * up, rounded to bf16, and the sum of |h|.
//
// Constants: HOT_WARPS, TRAIN_GATED, TRAIN_SQUARE.
#include "sparse/gradients.cuh"

extern "C" __global__ void __launch_bounds__(HOT_WARPS * 32)
    train_hot_forward(const uint4* first,  // (tokens, hots) bf16: x . gate, without a gate x . up
                      uint4* inner,        // (tokens, hots) bf16: x . up, without a gate not read; h takes its place
                      float* sums,         // (tokens,): added to
                      u32 tokens, u32 hots) {
  const u32 vectors = hots / 8;
  for (u32 token = blockIdx.x * HOT_WARPS + warp_index(); token < tokens; token += gridDim.x * HOT_WARPS) {
    const u64 begin = static_cast<u64>(token) * vectors;
    float absolute = 0.0f;
    for (u32 i = lane_index(); i < vectors; i += WARP) {
      const uint4 a = first[begin + i], b = TRAIN_GATED ? inner[begin + i] : make_uint4(0, 0, 0, 0);
      u32 pairs[4];
#pragma unroll
      for (u32 k = 0; k < 4; k++) {
        float h[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          h[half] = activate<TRAIN_SQUARE>(relu(__uint_as_float(half_of(a, 2 * k + half) << 16)));
          if constexpr (TRAIN_GATED) h[half] *= __uint_as_float(half_of(b, 2 * k + half) << 16);
        }
        pairs[k] = bf16_pair(h[0], h[1]);
        const float low = bf16_low(pairs[k]), high = bf16_high(pairs[k]);
        absolute += (low < 0.0f ? -low : low) + (high < 0.0f ? -high : high);
      }
      inner[begin + i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    __syncwarp();
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) absolute += shuffle_xor(absolute, distance);
    if (lane_index() == 0) sums[token] += absolute;
  }
}
