// The gradient of a token's x, a CTA each: the sum over its active neurons of their gate and up rows, times the gradients
// of the products with these. The products themselves are made again: the rows are here in any case.
#include "sparse/training.cuh"

extern "C" __global__ void __launch_bounds__(TRAIN_THREADS)
    train_tokens(const uint4* x,         // (tokens, hidden) bf16
                 const uint4* grad_out,  // (tokens, hidden) bf16
                 const float* l1,        // (1,): the gradient of the sum of all |h|
                 const u32* masks,       // (tokens, words)
                 const uint4* gate,      // (inner, hidden) bf16; without a gate not looked at
                 const uint4* up,        // (inner, hidden) bf16
                 const uint4* down,      // (inner, hidden) bf16
                 uint4* grad_x,          // (tokens, hidden) bf16
                 u32 tokens, u32 words,
                 u32 accumulate) {  // 1: add to what `grad_x` holds
  constexpr u32 UP = 0, DOWN = 1, GATE = 2;
  const u32 token = blockIdx.x;
  Gather<2 + TRAIN_GATED> gather(dynamic_shared());
  gather.matrices[UP] = up;
  gather.matrices[DOWN] = down;
  if constexpr (TRAIN_GATED) gather.matrices[GATE] = gate;
  const Row own_x = load_row(x, token), own_grad = load_row(grad_out, token);
  const float penalty = *l1;
  Sums result;
  result.clear();
  for (u32 begin = 0; begin < words; begin += TRAIN_THREADS) {
    const u32 count = gather.collect(masks + static_cast<u64>(token) * words, begin, words);
    gather.issue(0, 0, count);
    for (u32 entry = 0, slot = 0; entry < count; entry += TRAIN_BATCH, slot ^= 1) {
      gather.issue(slot ^ 1, entry + TRAIN_BATCH, count);
      async_copies_wait<1>();
      float v[TRAIN_SUMS] = {};
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++)
#pragma unroll
        for (u32 i = 0; i < TRAIN_VECTORS; i++) {
          if constexpr (TRAIN_GATED) v[3 * j] += dot(own_x.part[i], *gather.stage(slot, j, GATE, i));
          v[3 * j + 1] += dot(own_x.part[i], *gather.stage(slot, j, UP, i));
          v[3 * j + 2] += dot(own_grad.part[i], *gather.stage(slot, j, DOWN, i));
        }
      const float dots = gather.sum(v, slot);
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++) {
        const Active active = differentiate(dots, j, penalty);
        if (entry + j >= count) continue;
#pragma unroll
        for (u32 i = 0; i < TRAIN_VECTORS; i++) {
          if constexpr (TRAIN_GATED) result.add(i, active.gate, *gather.stage(slot, j, GATE, i));
          result.add(i, active.up, *gather.stage(slot, j, UP, i));
        }
      }
    }
    async_copies_wait<0>();
  }
  result.store(grad_x, token, accumulate);
}
