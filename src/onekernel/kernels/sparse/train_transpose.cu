// Bits by token -> bits by neuron, whose order is that of tokens whatever runs first; and how many a neuron has.
//
// A warp turns 32 x 32 bits with a ballot per neuron. Neighbouring warps take neighbouring words of the same tokens, which
// lie in the same sectors.
//
// Constants: TRANSPOSE_WARPS, TRANSPOSE_BLOCKS (8).
#include "ptx/atomic.cuh"
#include "ptx/platform.cuh"
#include "ptx/shuffle.cuh"

extern "C" __global__ void __launch_bounds__(TRANSPOSE_WARPS * 32)
    train_transpose(const u32* masks,  // (tokens, words)
                    u32* by_neuron,    // (32 * words, blocks): bit l of word b is token 32 b + l
                    u32* counts,       // (32 * words,): added to; whole numbers, so their order does not matter
                    u32 tokens, u32 words, u32 blocks) {
  const u32 tile = blockIdx.x * TRANSPOSE_WARPS + warp_index(), word = tile % words, group = tile / words;
  if (group >= blocks / TRANSPOSE_BLOCKS) return;
  u32 found[TRANSPOSE_BLOCKS], count = 0;
#pragma unroll
  for (u32 b = 0; b < TRANSPOSE_BLOCKS; b++) {
    const u32 token = (group * TRANSPOSE_BLOCKS + b) * WARP + lane_index();
    const u32 bits = token < tokens ? masks[static_cast<u64>(token) * words + word] : 0;
    u32 mine = 0;
#pragma unroll
    for (u32 neuron = 0; neuron < WARP; neuron++) {
      const u32 ballot = warp_ballot(bits >> neuron & 1);
      if (neuron == lane_index()) mine = ballot;
    }
    found[b] = mine;
    count += __popc(mine);
  }
  const u32 neuron = word * WARP + lane_index();
  u32* to = by_neuron + static_cast<u64>(neuron) * blocks + group * TRANSPOSE_BLOCKS;
#pragma unroll
  for (u32 b = 0; b < TRANSPOSE_BLOCKS; b += 4)
    *reinterpret_cast<uint4*>(to + b) = make_uint4(found[b], found[b + 1], found[b + 2], found[b + 3]);
  if (count) add_relaxed_gpu(counts + neuron, count);
}
