// The values that decide who is active -> a bit each, all that training keeps of them, and how many a token has.
//
// Constants: MASK_WARPS.
#include "sparse/words.cuh"

extern "C" __global__ void __launch_bounds__(MASK_WARPS * 32)
    train_masks(const uint4* values,  // (tokens, inner) bf16; inner is 32 * words
                u32* masks,           // (tokens, words)
                u32* counts,          // (tokens,)
                u32 tokens, u32 inner, u32 words) {
  for (u32 token = blockIdx.x * MASK_WARPS + warp_index(); token < tokens; token += gridDim.x * MASK_WARPS) {
    const uint4* from = values + static_cast<u64>(token) * (inner / 8);
    u32 count = 0;
    for (u32 word = lane_index(); word < words; word += WARP) {
      u32 mask = 0;
#pragma unroll
      for (u32 part = 0; part < 4; part++) mask |= kept_mask(from[word * 4 + part]) << (8 * part);
      masks[static_cast<u64>(token) * words + word] = mask;
      count += __popc(mask);
    }
    __syncwarp();
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) count += shuffle_xor(count, distance);
    if (lane_index() == 0) counts[token] = count;
  }
}
