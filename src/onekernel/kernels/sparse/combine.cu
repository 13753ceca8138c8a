// The partial sums of up.cu -> one list of (column, activate(gate) * up) words per token, for down.cu.
//
// Slices are added in order: the result does not depend on the grid. The product is rounded to bf16 as in a dense
// feed-forward, whose inner activation is a bf16 matrix.
//
// Constants: COMBINE_WARPS, COMBINE_SQUARE.
#include "sparse/words.cuh"

extern "C" __global__ void __launch_bounds__(COMBINE_WARPS * 32)
    sparse_combine(const u32* words,      // (tokens, tiles, capacity)
                   const u32* counts,     // (tokens, tiles)
                   const float* partial,  // (slices, tokens, tiles, capacity)
                   u32* lists,            // (tokens, tiles * capacity)
                   u32* lengths,          // (tokens,)
                   u32 tokens, u32 slices, u32 tiles, u32 capacity) {
  const u64 stride = static_cast<u64>(tokens) * tiles * capacity;
  for (u32 token = blockIdx.x * COMBINE_WARPS + warp_index(); token < tokens; token += gridDim.x * COMBINE_WARPS) {
    const u64 begin = static_cast<u64>(token) * tiles;
    u32 length = 0;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 count = counts[begin + tile];
      for (u32 entry = lane_index(); entry < count; entry += WARP) {
        const u64 at = (begin + tile) * capacity + entry;
        float sum = 0.0f;
#pragma unroll 8
        for (u32 slice = 0; slice < slices; slice++) sum += partial[slice * stride + at];
        const u32 word = words[at];
        lists[begin * capacity + length + entry] =
            word_of(word_column(word), activate<COMBINE_SQUARE>(word_value(word)) * sum);
      }
      length += count;
    }
    if (lane_index() == 0) lengths[token] = length;
  }
}
