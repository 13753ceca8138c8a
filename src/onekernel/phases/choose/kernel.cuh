// The choose phase, by one CTA: the best token of all CTAs, whether it is the last, and the word that tells everybody.
#pragma once

#include "phases/head/kernel.cuh"

__device__ __forceinline__ bool is_stop_id(const Launch& launch, u32 token) {
#pragma unroll 1
  for (u32 i = 0; i < launch.stop_count; i++)
    if (launch.stop_ids[i] == token) return true;
  return false;
}

// All consumers take the CTAs' bests, so that it costs one round trip, and leave each warp's.
__device__ __forceinline__ bool take_bests(const Machine& m, const Task& task) {
  bool ok = true;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    Best best{LOWEST, NO_TOKEN};
#pragma unroll 1
    for (u32 cta = threadIdx.x; ok && cta < m.header.ctas; cta += CONSUMERS) {
      float logit;
      u32 token;
      ok = m.take_two_words(m.header.best_word + (s * m.header.ctas + cta) * 2, task.in_phase, logit, token);
      if (ok) best.add(logit, token);
    }
    __syncwarp();
    best.add_warp();
    if (lane_index() == 0) warp_bests(m, s)[warp_index()] = best;
  }
  return ok;
}

// `stopped` holds a bit for each sequence that has ended; only thread 0 of the choosing CTA uses it. Whatever ends an
// answer is folded into the token's word here, so that all CTAs agree; the host's cancel word is read by nobody else.
__device__ __forceinline__ bool choose_phase(const Machine& m, const Task& task, u32& stopped) {
  // Thread 0 may still be publishing the head's bests from the words that the warps write next.
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (!m.meet(take_bests(m, task))) return false;
  if (threadIdx.x > 0) return true;
  const bool all_end = m.token + 1 == m.launch.limit || load_relaxed_sys(m.launch.cancel) != 0;
  const u32 before = stopped;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const Best best = best_of_warps(m, s);
    const u32 token = is_finite(best.logit) ? best.token : TOKEN_NON_FINITE;
    if (all_end || token & TOKEN_NON_FINITE || is_stop_id(m.launch, token)) stopped |= 1u << s;
    if (before >> s & 1) continue;
    const u32 last = stopped >> s & 1 ? TOKEN_STOP : 0;
    store_relaxed_sys(m.launch.slots + static_cast<u64>(m.token) * SEQUENCES + s, tagged(token | last, m.token + 1));
  }
  const bool launch_ends = stopped == (1u << SEQUENCES) - 1;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    // A sequence that has ended goes on, with a token that exists, until the others have ended too.
    const Best best = best_of_warps(m, s);
    m.give_word(m.header.token_word + s, (is_finite(best.logit) ? best.token : 0) | (launch_ends ? TOKEN_STOP : 0));
  }
  return true;
}
