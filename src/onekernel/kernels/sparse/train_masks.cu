// The values that decide who is active -> a bit each, all that training keeps of them, and how many a token has. Hot
// neurons get no bit; their values are kept instead, side by side.
//
// Constants: MASK_WARPS.
#include "sparse/words.cuh"

// The bit of every hot neuron, from a list of them, by way of a byte each.
__device__ __forceinline__ void mark_hot(u32* marked, u8* flags, const u32* hot, u32 hots, u32 words) {
  u32* four = reinterpret_cast<u32*>(flags);
  for (u32 i = threadIdx.x; i < words * 8; i += MASK_WARPS * WARP) four[i] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < hots; i += MASK_WARPS * WARP) flags[hot[i]] = 1;
  __syncthreads();
  for (u32 word = threadIdx.x; word < words; word += MASK_WARPS * WARP) {
    u32 mask = 0;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) {  // four bytes of 0 or 1 -> four bits
      const u32 bytes = four[word * 8 + i];
      mask |= (bytes | bytes >> 7 | bytes >> 14 | bytes >> 21) << 28 >> (28 - 4 * i);
    }
    marked[word] = mask;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MASK_WARPS * 32)
    train_masks(const uint4* values,  // (tokens, inner) bf16; inner is 32 * words
                const u32* hot,       // (hots,): each neuron once
                u32* masks,           // (tokens, words): of the others
                u32* counts,          // (tokens,): of all
                u16* kept_values,     // (tokens, width) bf16: of the hot ones, then zeros
                u32 tokens, u32 inner, u32 words, u32 hots, u32 width) {
  u32* marked = reinterpret_cast<u32*>(dynamic_shared());  // (words,), then a byte per neuron
  mark_hot(marked, reinterpret_cast<u8*>(marked + words), hot, hots, words);
  for (u32 token = blockIdx.x * MASK_WARPS + warp_index(); token < tokens; token += gridDim.x * MASK_WARPS) {
    const uint4* from = values + static_cast<u64>(token) * (inner / 8);
    u32 count = 0;
    for (u32 word = lane_index(); word < words; word += WARP) {
      u32 mask = 0;
#pragma unroll
      for (u32 part = 0; part < 4; part++) mask |= kept_mask(from[word * 4 + part]) << (8 * part);
      masks[static_cast<u64>(token) * words + word] = mask & ~marked[word];
      count += __popc(mask);
    }
    const u16* row = reinterpret_cast<const u16*>(from);
    u16* const to = kept_values + static_cast<u64>(token) * width;
#pragma unroll 2
    for (u32 i = lane_index(); i < width; i += WARP) to[i] = i < hots ? row[hot[i]] : 0;
    __syncwarp();
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) count += shuffle_xor(count, distance);
    if (lane_index() == 0) counts[token] = count;
  }
}
