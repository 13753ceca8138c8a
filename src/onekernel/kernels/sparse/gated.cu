// activate(gate) * up in one pass, for the neurons that are multiplied densely: PyTorch's two passes move 1.7 times the
// bytes. The factors are rounded once, at the end.
//
// Constants: GATED_THREADS, GATED_SQUARE, GATED_UP (0: activate(gate) alone).
#include "sparse/words.cuh"

// ReLU that passes NaN on.
__device__ __forceinline__ float relu(float value) { return value < 0.0f ? 0.0f : value; }

__device__ __forceinline__ u32 product(u32 gate, u32 up) {
  float low = activate<GATED_SQUARE>(relu(bf16_low(gate))), high = activate<GATED_SQUARE>(relu(bf16_high(gate)));
  if constexpr (GATED_UP) {
    low *= bf16_low(up);
    high *= bf16_high(up);
  }
  return bf16_pair(low, high);
}

extern "C" __global__ void __launch_bounds__(GATED_THREADS)
    gated(const uint4* gate,  // (tokens, width) bf16
          uint4* up,          // (tokens, columns) bf16; the result takes its place
          u32 tokens, u32 width, u32 columns) {
  const u32 vectors = columns / 8;
  for (u32 token = blockIdx.x; token < tokens; token += gridDim.x) {
    const uint4* from = gate + static_cast<u64>(token) * (width / 8);
    uint4* to = up + static_cast<u64>(token) * vectors;
    for (u32 i = threadIdx.x; i < vectors; i += GATED_THREADS) {
      const uint4 g = from[i], u = GATED_UP ? to[i] : make_uint4(0, 0, 0, 0);
      to[i] = make_uint4(product(g.x, u.x), product(g.y, u.y), product(g.z, u.z), product(g.w, u.w));
    }
  }
}
