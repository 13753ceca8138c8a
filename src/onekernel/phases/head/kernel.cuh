// The head phase: logits of the CTA's vocabulary rows; it publishes the largest, the lowest token that has it, and whether
// any logit was not finite.
#pragma once

#include "tile/product.cuh"

constexpr u32 NO_TOKEN = 0xFFFFFFFFu;      // of a CTA without rows
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;  // published in place of a logit if any was not finite
constexpr float LOWEST = -3.402823466e38f;

// Infinity minus itself is NaN, and so is NaN minus anything.
__device__ __forceinline__ bool is_finite(float value) { return value - value == 0; }

// The best of some logits; if any was not finite, `logit` is NaN, and stays so.
struct Best {
  float logit;
  u32 token;

  __device__ __forceinline__ void add(float other, u32 other_token) {
    const bool better = other > logit || (other == logit && other_token < token);
    if (is_finite(logit) && (better || !is_finite(other))) {
      logit = is_finite(other) ? other : __uint_as_float(NOT_A_NUMBER);
      token = other_token;
    }
  }

  // Of all lanes, in all lanes.
  __device__ __forceinline__ void add_warp() {
#pragma unroll 1
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
      const float other = shuffle_xor(logit, mask);
      const u32 other_token = shuffle_xor(token, mask);
      add(other, other_token);
    }
  }
};

// Each warp's best so far, of one sequence: (MK_WARPS) in shared memory.
__device__ __forceinline__ Best* warp_bests(const Machine& m, u32 sequence) {
  return reinterpret_cast<Best*>(m.shared.words() + WORD_BEST) + sequence * MK_WARPS;
}

__device__ __forceinline__ void start_bests(const Machine& m) {
  for (u32 i = threadIdx.x; i < SEQUENCES * MK_WARPS; i += CONSUMERS) *(warp_bests(m, 0) + i) = Best{LOWEST, NO_TOKEN};
}

__device__ __forceinline__ void head_rows(const Machine& m, const Task& task, const Rows& rows) {
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const float factor = norm_factor(m, task, s);
    Best best = warp_bests(m, s)[warp_index()];
#pragma unroll 1
    for (u32 row = threadIdx.x * 2; row < rows.count; row += CONSUMERS * 2) {
      const float2 sum = sum_parts(m, rows, s, row);
      const float logits[2] = {sum.x * factor, sum.y * factor};
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const u32 token = rows.first + row + i;
        if (token >= m.header.vocab_limit) continue;
        best.add(logits[i], token);
        if (m.launch.logits != nullptr) m.launch.logits[static_cast<u64>(s) * m.launch.logit_stride + token] = logits[i];
      }
    }
    best.add_warp();
    if (lane_index() == 0) warp_bests(m, s)[warp_index()] = best;
    __syncwarp();
  }
}

// After a meeting.
__device__ __forceinline__ Best best_of_warps(const Machine& m, u32 sequence) {
  Best best{LOWEST, NO_TOKEN};
#pragma unroll 1
  for (u32 w = 0; w < MK_WARPS; w++) best.add(warp_bests(m, sequence)[w].logit, warp_bests(m, sequence)[w].token);
  return best;
}

// Publishes the best of the CTA's warps, after a meeting; every CTA does, also one without rows.
__device__ __forceinline__ void publish_bests(const Machine& m) {
  if (threadIdx.x >= SEQUENCES) return;
  const Best best = best_of_warps(m, threadIdx.x);
  const u32 word = m.header.best_word + (threadIdx.x * m.header.ctas + blockIdx.x) * 2;
  m.give_word(word, __float_as_uint(best.logit));
  m.give_word(word + 1, best.token);
}
