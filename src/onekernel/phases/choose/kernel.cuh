// The choose phase: which token comes next, whether it is the last, and the word that tells everybody.
//
// Greedy and plain temperature are an argmax: of the logits, or of score + noise, whose noise depends on seed, position and
// token id alone. Each CTA publishes its best with the head phase, and one CTA takes them: sampling costs no hand-over.
// Filters and log probabilities need the distribution: then each CTA publishes its likeliest tokens and its mass with the
// head, and one CTA takes all of them and chooses (rounds.cuh). Only where a cut may lie behind what is listed does it call
// the others, and all look together, digit by digit (together.cuh). Every sum is of whole numbers, so for the same logits
// every partition gives the same token, bit for bit the one of reference.py. What differs is only log probabilities, by the
// rounding of a float, and with it the order of two of the likeliest tokens whose log probabilities the reference rounds to
// the same number.
//
// Nothing of the sampling is compiled in: its values are a record in memory, and `mode` says how much of it is read.
#pragma once

#include "phases/choose/rounds.cuh"

// All consumers take the CTAs' bests, so that it costs one round trip, and leave each warp's.
__device__ __forceinline__ bool take_bests(const Machine& m, const Task& task) {
  const u32 thread = forget(threadIdx.x);
  bool ok = true;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    Best best{NO_LEVEL, NO_TOKEN};
    const u32 word = m.header.best_word + s * m.header.ctas * 2;
    ok = take_pairs<CONSUMERS, 1>(
             m.watch, reinterpret_cast<const Pair*>(m.launch.exchange + word), m.header.ctas, m.tag_of(task.in_phase), thread,
             [&](u32, u32 level, u32 token) { best.add(level, token); }, word) && ok;
    __syncwarp();
    best.add_warp();
    if (thread % WARP == 0) warp_bests(m, s)[thread / WARP] = best;
  }
  return ok;
}

// One warp, whose lane s has what came out for sequence s. Whatever ends an answer is folded into the token's word here, so
// that all CTAs agree; the host's cancel word is read by nobody else. All CTAs wait for that word, so it goes out first.
__device__ __forceinline__ void conclude(const Machine& m, u32 outcome, bool cancelled, u32 stop_id) {
  constexpr u32 ALL = (1u << SEQUENCES) - 1;
  const u32 lane = forget(threadIdx.x) % WARP, index = forget(m.token);
  bool ends = index + 1 == m.launch.limit || cancelled || outcome & TOKEN_FAILED;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 token = shuffle_index(outcome, s);
    bool found = stop_id == token;
#pragma unroll 1
    for (u32 i = WARP + lane; i < m.launch.stop_count; i += WARP) found |= m.launch.stop_ids[i] == token;
    __syncwarp();
    if (warp_ballot(found) != 0 && lane == s) ends = true;
  }
  const u32 before = m.shared.words()[WORD_STOPPED];  // a bit for each sequence that has ended; nobody else uses it
  const u32 stopped = before | (warp_ballot(ends) & ALL);
  if (lane >= SEQUENCES) return;
  // A sequence that has ended goes on, with a token that exists, until the others have ended too.
  m.give_word(m.header.token_word + lane, (outcome & TOKEN_FAILED ? 0 : outcome) | (stopped == ALL ? TOKEN_STOP : 0));
  if (!(before >> lane & 1)) {
    const u32 last = stopped >> lane & 1 ? TOKEN_STOP : 0;
    store_relaxed_sys(m.launch.slots + static_cast<u64>(index) * SEQUENCES + lane, tagged(outcome | last, index + 1));
  }
  if (lane == 0) m.shared.words()[WORD_STOPPED] = stopped;
}

__device__ __forceinline__ bool choose_phase(const Machine& m, const Task& task) {
  const bool chooses = task.count > 0, rounds = m.launch.choosing.mode == CHOOSE_ROUNDS;
  if (!chooses && !rounds) return true;
  const u32 lane = forget(threadIdx.x) % WARP;
  const bool concludes = chooses && forget(threadIdx.x) < WARP;
  // What is far away is asked for before it is wanted: the host's word takes longer than the bests.
  u32 cancelled = 0, stop_id = NO_TOKEN, outcome = 0;
  if (concludes) {
    cancelled = load_relaxed_sys(m.launch.cancel);
    if (lane < m.launch.stop_count) stop_id = m.launch.stop_ids[lane];
  }
  // Warps may still be publishing the head's bests from the words that are written next.
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (rounds) {
    if (!choose_in_rounds(m, chooses)) return false;
  } else if (!m.meet(take_bests(m, task))) {
    return false;
  }
  if (!concludes) return true;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 one = rounds ? choice_shared(m).outcomes[s] : outcome_of(best_of(warp_bests(m, s)));
    if (lane == s % WARP || SEQUENCES == 1) outcome = one;
  }
  conclude(m, outcome, cancelled != 0, stop_id);
  return true;
}
