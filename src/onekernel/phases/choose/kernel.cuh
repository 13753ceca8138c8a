// The choose phase: which token comes next, whether it is the last, and the word that tells everybody.
//
// Greedy and plain temperature are an argmax: of the logits, or of score + noise, whose noise depends on seed, position and
// token id alone. Each CTA publishes its best with the head phase, and one CTA takes them: sampling costs no hand-over.
// Filters and log probabilities need the distribution: then all CTAs take part, in rounds (rounds.cuh), and every sum is of
// whole numbers. So for the same logits every partition gives the same token, bit for bit the one of reference.py. What
// differs is only log probabilities, by the rounding of a float, and with it the order of two of the likeliest tokens
// whose log probabilities the reference rounds to the same number.
//
// Nothing of the sampling is compiled in: its values are a record in memory, and `mode` says how much of it is read.
#pragma once

#include "phases/choose/rounds.cuh"

__device__ __forceinline__ bool is_stop_id(const Launch& launch, u32 token) {
#pragma unroll 1
  for (u32 i = 0; i < launch.stop_count; i++)
    if (launch.stop_ids[i] == token) return true;
  return false;
}

// After the head, in place of publish_bests: what the CTA's rows score, and the best of that.
__device__ __forceinline__ void publish_scores(const Machine& m, const Task& task) {
  const Choosing& choosing = m.launch.choosing;
  ChoiceShared& shared = choice_shared(m);
  const u32 tile_rows = task.flags & FLAG_ROWS_4 ? 4 : 8;
  const u32 end = min((task.first + task.count) * tile_rows, m.header.vocab_limit);
#pragma unroll 1
  for (u32 i = 0; i < SEQUENCES; i++) {
    const u32 s = SEQUENCES == 1 ? 0 : forget(i);
    const Sampling& sampling = choosing.sampling[s];
    const bool filtered = sampling.flags & CHOOSE_FILTERED;
    const float* logits = m.launch.logits + static_cast<u64>(s) * m.launch.logit_stride;
    Best best{LOWEST, NO_TOKEN};
#pragma unroll 1
    for (u32 token = task.first * tile_rows + forget(threadIdx.x) * 2; token < end; token += CONSUMERS * 2) {
      uint4 words = make_uint4(0, 0, 0, 0);
      if (!filtered && sampling.temperature > 0) words = philox(sampling.seed, m.position(s) + 1, token / 4);
#pragma unroll 1
      for (u32 i = 0; i < 2; i++) {
        if (token + i >= end) continue;
        const float score = score_of(m, sampling, s, token + i, logits[token + i]);
        if (filtered) choosing.scores[static_cast<u64>(s) * m.launch.logit_stride + token + i] = score;
        if (score == minus_infinity()) continue;
        if (!is_finite(score))
          best.fail(FAILED_SCORES);
        else
          best.add(!filtered && sampling.temperature > 0 ? score + gumbel(word_of(words, token + i)) : score, token + i);
      }
    }
    __syncwarp();
    best.add_warp();
    if (lane_index() == 0) shared.bests[s][warp_index()] = best;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (threadIdx.x >= SEQUENCES) return;
  const u32 s = threadIdx.x;
  const Best logit = best_of_warps(m, s);
  Best best = best_of(shared.bests[s]);
  if (!is_finite(logit.logit)) best = logit;
  if (choosing.mode != CHOOSE_ROUNDS) {
    publish_best(m, s, best);
    return;
  }
  const Choice c = choice_of(m, s, false);
  c.give_pair(c.own() + CHOICE_TOP, __float_as_uint(best.logit), best.token);
  c.give_pair(c.own() + CHOICE_TOP + 2, __float_as_uint(logit.logit), 0);
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

// Whatever ends an
// answer is folded into the token's word here, so that all CTAs agree; the host's cancel word is read by nobody else.
__device__ __forceinline__ bool choose_phase(const Machine& m, const Task& task) {
  const bool chooses = task.count > 0, rounds = m.launch.choosing.mode == CHOOSE_ROUNDS;
  if (!chooses && !rounds) return true;
  // Thread 0 may still be publishing the head's bests from the words that the warps write next.
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (rounds) {
#pragma unroll 1
    for (u32 s = 0; s < SEQUENCES; s++)
      if (!choose_in_rounds(m, s, chooses)) return false;
    if (!chooses) return true;
  } else if (!m.meet(take_bests(m, task))) {
    return false;
  }
  if (threadIdx.x > 0) return true;
  const ChoiceShared& shared = choice_shared(m);
  const u32 index = forget(m.token);
  const bool all_end = index + 1 == m.launch.limit || load_relaxed_sys(m.launch.cancel) != 0;
  const u32 before = m.shared.words()[WORD_STOPPED];  // a bit for each sequence that has ended; nobody else uses it
  u32 stopped = before;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 token = rounds ? shared.outcomes[s] : outcome_of(best_of_warps(m, s));
    if (all_end || token & TOKEN_FAILED || is_stop_id(m.launch, token)) stopped |= 1u << s;
    if (before >> s & 1) continue;
    const u32 last = stopped >> s & 1 ? TOKEN_STOP : 0;
    store_relaxed_sys(m.launch.slots + static_cast<u64>(index) * SEQUENCES + s, tagged(token | last, index + 1));
  }
  m.shared.words()[WORD_STOPPED] = stopped;
  const bool launch_ends = stopped == (1u << SEQUENCES) - 1;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    // A sequence that has ended goes on, with a token that exists, until the others have ended too.
    const u32 token = rounds ? shared.outcomes[s] : outcome_of(best_of_warps(m, s));
    m.give_word(m.header.token_word + s, (token & TOKEN_FAILED ? 0 : token) | (launch_ends ? TOKEN_STOP : 0));
  }
  return true;
}
