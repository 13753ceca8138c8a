// A token's output in training, a CTA each: the sum over its active neurons of h times their down rows, with h =
// activate(gate) * (x . up) rounded to bf16 as in a dense feed-forward; and the sum of |h| for the L1 term.
#include "sparse/training.cuh"

extern "C" __global__ void __launch_bounds__(TRAIN_THREADS)
    train_forward(const uint4* x,     // (tokens, hidden) bf16
                  const u16* values,  // (tokens, inner) bf16: of the active neurons before the activation
                  const u32* masks,   // (tokens, words)
                  const uint4* up,    // (inner, hidden) bf16; without a gate not looked at
                  const uint4* down,  // (inner, hidden) bf16
                  float* sums,        // (tokens,)
                  uint4* out,         // (tokens, hidden) bf16
                  u32 tokens, u32 inner, u32 words,
                  u32 accumulate) {  // 1: add to what `out` holds
  constexpr u32 DOWN = TRAIN_GATED;  // the down row's place behind the up row
  const u32 token = blockIdx.x;
  Gather<1 + TRAIN_GATED> gather(dynamic_shared());
  if constexpr (TRAIN_GATED) gather.matrices[0] = up;
  gather.matrices[DOWN] = down;
  const Row own = load_row(x, token);
  Sums result;
  result.clear();
  float absolute = 0.0f;
  for (u32 begin = 0; begin < words; begin += TRAIN_THREADS) {
    const u32 count = gather.collect(masks + static_cast<u64>(token) * words, begin, words);
    const u16* mine = values + static_cast<u64>(token) * inner + gather.first;
    const auto value_of = [&](u32 entry) -> u32 {  // lane j holds that of entry j of a batch
      return lane_index() < TRAIN_BATCH && entry + lane_index() < count ? mine[gather.list[entry + lane_index()]] : 0;
    };
    gather.issue(0, 0, count);
    u32 next = value_of(0);
    for (u32 entry = 0, slot = 0; entry < count; entry += TRAIN_BATCH, slot ^= 1) {
      const float value = __uint_as_float(next << 16);
      gather.issue(slot ^ 1, entry + TRAIN_BATCH, count);
      next = value_of(entry + TRAIN_BATCH);
      async_copies_wait<1>();
      float dots = 1.0f;
      if constexpr (TRAIN_GATED) {
        float v[TRAIN_SUMS] = {};
#pragma unroll
        for (u32 j = 0; j < TRAIN_BATCH; j++)
#pragma unroll
          for (u32 i = 0; i < TRAIN_VECTORS; i++) v[j] += dot(own.part[i], *gather.stage(slot, j, 0, i));
        dots = gather.sum(v, slot);
      }
      const float inner_value = bf16_high(word_of(0, activate<TRAIN_SQUARE>(value) * dots));
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++) {
        const float h = shuffle_index(inner_value, j);
        if (entry + j >= count) continue;
        absolute += h < 0.0f ? -h : h;
#pragma unroll
        for (u32 i = 0; i < TRAIN_VECTORS; i++) result.add(i, h, *gather.stage(slot, j, DOWN, i));
      }
    }
    async_copies_wait<0>();
  }
  result.store(out, token, accumulate);
  if (threadIdx.x == 0) sums[token] = absolute;
}
