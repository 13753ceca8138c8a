// The head phase: logits of the CTA's vocabulary rows; it publishes the largest, the lowest token that has it, and whether
// any logit was not finite.
#pragma once

#include "tile/quantised.cuh"

constexpr u32 NO_TOKEN = 0xFFFFFFFFu;      // of a CTA without rows
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;  // published in place of a logit if no token can be chosen
constexpr float LOWEST = -3.402823466e38f;

// Infinity minus itself is NaN, and so is NaN minus anything.
__device__ __forceinline__ bool is_finite(float value) { return value - value == 0; }

// The best of some logits; if any was not finite, `logit` is NaN, stays so, and `token` says why: FAILED_LOGITS, or what
// an other cause was given by; of several the lowest.
struct Best {
  float logit;
  u32 token;

  __device__ __forceinline__ void fail(u32 why) {
    token = is_finite(logit) ? why : min(token, why);
    logit = __uint_as_float(NOT_A_NUMBER);
  }

  // `other` is a logit, or what another Best has found.
  __device__ __forceinline__ void add(float other, u32 other_token) {
    if (!is_finite(other)) {
      fail(other_token);
    } else if (is_finite(logit) && (other > logit || (other == logit && other_token < token))) {
      logit = other;
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
    const float factor = HEAD_INT8 ? 1.0f : norm_factor(m, task, s);
    Best best = warp_bests(m, s)[warp_index()];
#pragma unroll 1
    for (u32 row = threadIdx.x * 2; row < rows.count; row += CONSUMERS * 2) {
      const float2 sum = HEAD_INT8 ? quantised_pair<true>(m, rows, row) : make_float2(sum_parts(m, rows, s, row), sum_parts(m, rows, s, row + 1));
      const float logits[2] = {sum.x * factor, sum.y * factor};
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        const u32 token = rows.first + row + i;
        if (token >= m.header.vocab_limit) continue;
        best.add(logits[i], is_finite(logits[i]) ? token : FAILED_LOGITS);
        if (m.launch.logit_stride > 0) m.launch.logits[static_cast<u64>(s) * m.launch.logit_stride + token] = logits[i];
      }
    }
    best.add_warp();
    if (lane_index() == 0) warp_bests(m, s)[warp_index()] = best;
    __syncwarp();
  }
}

// Of all warps, after a meeting.
__device__ __forceinline__ Best best_of(const Best* warps) {
  Best best{LOWEST, NO_TOKEN};
#pragma unroll 1
  for (u32 w = 0; w < MK_WARPS; w++) best.add(warps[w].logit, warps[w].token);
  return best;
}

__device__ __forceinline__ Best best_of_warps(const Machine& m, u32 sequence) { return best_of(warp_bests(m, sequence)); }

// The token, or TOKEN_FAILED and why there is none.
__device__ __forceinline__ u32 outcome_of(const Best& best) {
  if (!is_finite(best.logit)) return TOKEN_FAILED | best.token;
  return best.token == NO_TOKEN ? TOKEN_FAILED | FAILED_EMPTY : best.token;
}

__device__ __forceinline__ void publish_best(const Machine& m, u32 sequence, const Best& best) {
  const u32 word = m.header.best_word + (sequence * m.header.ctas + blockIdx.x) * 2;
  m.give_word(word, __float_as_uint(best.logit));
  m.give_word(word + 1, best.token);
}

// Publishes the best of the CTA's warps, after a meeting; every CTA does, also one without rows.
__device__ __forceinline__ void publish_bests(const Machine& m) {
  if (threadIdx.x < SEQUENCES) publish_best(m, threadIdx.x, best_of_warps(m, threadIdx.x));
}
