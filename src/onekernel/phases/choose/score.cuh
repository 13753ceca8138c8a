// From a raw logit to the score that filters and the draw see: mask, bias, penalties, temperature, in the order of
// filters.py, one rounding an operation.
#pragma once

#include "phases/choose/elementary.cuh"
#include "phases/choose/philox.cuh"
#include "tile/machine.cuh"

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// -inf: the token is not to be chosen.
__device__ __forceinline__ float score_of(const Machine& m, const Sampling& sampling, u32 sequence, u32 token, float raw) {
  const Choosing& choosing = m.launch.choosing;
  const u64 at = static_cast<u64>(sequence) * m.launch.logit_stride + token;
  u32 seen = 0;
  if (sampling.flags & CHOOSE_PENALISED) {
    seen = choosing.counts[at];
    // The token chosen last is counted by its row's owner when that next looks at it, so counts need no hand-over.
    if (m.token > 0 && m.shared.words()[WORD_TOKEN + sequence] == token) choosing.counts[at] = ++seen;
  }
  if (sampling.flags & CHOOSE_MASKED) {
    const u32 words = round_up(m.launch.logit_stride, 32) / 32;
    if (!(choosing.allowed[sequence * words + token / 32] >> token % 32 & 1)) return minus_infinity();
  }
  float score = raw;
  if (sampling.flags & CHOOSE_BIASED) score += choosing.bias[at];
  if (score == minus_infinity()) return score;
  if (seen > 0) {
    const float occurrences = static_cast<float>(seen & (PROMPT_TOKEN - 1));
    if (sampling.repetition != 1.0f)
      score = score < 0 ? __fmul_rn(score, sampling.repetition) : divide(score, sampling.repetition);
    if (occurrences > 0) score -= sampling.presence;
    score -= __fmul_rn(occurrences, sampling.frequency);
  }
  if (sampling.temperature > 0) score = divide(score, sampling.temperature);
  return score + 0.0f;  // -0 becomes 0: they are equal, and places compare bits
}

// The random word of a token among its group of four.
__device__ __forceinline__ u32 word_of(const uint4& words, u32 token) {
  const u32 low = token & 1 ? words.y : words.x, high = token & 1 ? words.w : words.z;
  return token & 2 ? high : low;
}
