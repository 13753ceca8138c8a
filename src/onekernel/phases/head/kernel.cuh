// The head phase: logits of the CTA's vocabulary rows; it publishes the largest, the lowest token that has it, and whether
// any logit was not finite.
#pragma once

#include "phases/embed/table.cuh"
#include "ptx/opaque.cuh"
#include "tile/quantised.cuh"

constexpr u32 NO_TOKEN = 0xFFFFFFFFu;                 // of a CTA without rows
constexpr u32 NO_LEVEL = 0, FAILED_LEVEL = 0xFFFFFFFFu;  // below and above those of all numbers

// Infinity minus itself is NaN, and so is NaN minus anything.
__device__ __forceinline__ bool is_finite(float value) { return value - value == 0; }

// A finite number as a whole one that orders as it does; -0 is 0.
__device__ __forceinline__ u32 level_of(float value) {
  const u32 bits = __float_as_uint(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 level) {
  return __uint_as_float(level >> 31 ? level & 0x7FFFFFFFu : ~level);
}

// The best of some tokens: the highest level, of equal ones the lowest id. With FAILED_LEVEL there is none, and `token`
// says why, so of several causes it is the lowest.
struct Best {
  u32 level, token;

  __device__ __forceinline__ void add(u32 other, u32 other_token) {
    if (other < level || (other == level && other_token >= token)) return;
    level = other;
    token = other_token;
  }

  // A number, or in its place what `why` names.
  __device__ __forceinline__ void add_value(float value, u32 of_token, u32 why) {
    if (is_finite(value)) {
      add(level_of(value), of_token);
    } else {
      add(FAILED_LEVEL, why);
    }
  }

  // Of all lanes, in all lanes.
  __device__ __forceinline__ void add_warp() {
    const u32 highest = warp_max(level);
    token = warp_min(level == highest ? token : NO_TOKEN);
    level = highest;
  }
};

// Each warp's best so far, of one sequence: (MK_WARPS) in shared memory.
__device__ __forceinline__ Best* warp_bests(const Machine& m, u32 sequence) {
  return reinterpret_cast<Best*>(m.shared.words() + WORD_BEST) + sequence * MK_WARPS;
}

__device__ __forceinline__ void start_bests(const Machine& m) {
  for (u32 i = threadIdx.x; i < SEQUENCES * MK_WARPS; i += CONSUMERS) *(warp_bests(m, 0) + i) = Best{NO_LEVEL, NO_TOKEN};
}

// `scale`: of an int8 head.
__device__ __forceinline__ void head_rows(const Machine& m, const Task& task, const Rows& rows, const RowScale<true>* scale = nullptr) {
  constexpr u32 EACH = HEAD_INT8 ? 1 : 2;
  if (EACH * (threadIdx.x - lane_index()) >= rows.count) return;  // a run has rows for few of the warps
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const float factor = HEAD_INT8 ? 1.0f : Norm(m, task, s).factor(m.header);
    Best best = warp_bests(m, s)[warp_index()];
#pragma unroll 1
    for (u32 row = threadIdx.x * EACH; row < rows.count; row += CONSUMERS * EACH) {
      const float2 sum = HEAD_INT8 ? make_float2(quantised_row<true>(m, rows, row, scale->of(m, task, rows, row)), 0) : make_float2(sum_parts(m, rows, s, row), sum_parts(m, rows, s, row + 1));
      const float logits[2] = {sum.x * factor, sum.y * factor};
#pragma unroll
      for (u32 i = 0; i < EACH; i++) {
        const u32 token = rows.first + row + i;
        if (token >= m.header.vocab_limit) continue;
        best.add_value(logits[i], token, FAILED_LOGITS);
        if (m.launch.logit_stride > 0) m.launch.logits[static_cast<u64>(s) * m.launch.logit_stride + token] = logits[i];
      }
    }
    __syncwarp();
    best.add_warp();
    if (lane_index() == 0) warp_bests(m, s)[warp_index()] = best;
    __syncwarp();
  }
}

// One warp: of all warps, after a meeting; in all lanes.
__device__ __forceinline__ Best best_of(const Best* warps) {
  static_assert(MK_WARPS <= WARP, "a lane each");
  Best best{NO_LEVEL, NO_TOKEN};
  const u32 lane = forget(threadIdx.x) % WARP;
  if (lane < MK_WARPS) best = warps[lane];
  __syncwarp();
  best.add_warp();
  return best;
}

// The token, or TOKEN_FAILED and why there is none.
__device__ __forceinline__ u32 outcome_of(const Best& best) {
  if (best.level == FAILED_LEVEL) return TOKEN_FAILED | best.token;
  return best.token == NO_TOKEN ? TOKEN_FAILED | FAILED_EMPTY : best.token;
}

// One warp. While the best travels, L2 fetches what will be read of it if it wins: memory would take longer than the choice.
__device__ __forceinline__ void publish_best(const Machine& m, u32 sequence, const Best& best) {
  const u32 word = m.header.best_word + (sequence * m.header.ctas + forget(blockIdx.x)) * 2, lane = forget(threadIdx.x) % WARP;
  if (lane < 2) m.give_word(word + lane, lane == 0 ? best.level : best.token);
  __syncwarp();
  prefetch_embedding(m, best.token);
}

// Publishes the best of the CTA's warps, after a meeting; every CTA does, also one without rows.
__device__ __forceinline__ void publish_bests(const Machine& m) {
#pragma unroll 1
  for (u32 s = forget(threadIdx.x) / WARP; s < SEQUENCES; s += MK_WARPS) publish_best(m, s, best_of(warp_bests(m, s)));
}
