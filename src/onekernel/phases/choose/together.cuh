// All CTAs look together for what the lists cannot decide: the place of the k-th token, or of the one with which the mass
// reaches p, found digit by digit of the places: four for most distributions, seven at most.
#pragma once

#include "phases/choose/cut.cuh"

enum Goal : u32 { TOP_K, TOP_P, GOALS };

__device__ __forceinline__ bool has_goal(const Sampling& sampling, u32 goal) {
  return goal == TOP_K ? sampling.top_k > 0 : sampling.flags & CHOOSE_TOP_P;
}

__device__ __forceinline__ u64 part_of(double p, u64 mass) { return static_cast<u64>(ceil(p * static_cast<double>(mass))); }

// Each warp's best, and of those the outcome of the choosing CTA.
__device__ __forceinline__ void note_best(const Choice& c, Best best) {
  __syncwarp();
  best.add_warp();
  if (c.lane() == 0) c.shared.bests[0][c.warp()] = best;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (c.warp() > 0) return;
  best = best_of(c.shared.bests[0]);
  if (c.lane() == 0) c.shared.outcomes[c.sequence] = outcome_of(best);
}

__device__ __forceinline__ void draw_one(const Choice& c, float score, u32 token, Best& best) {
  const uint4 words = philox(c.sampling().seed, c.m.position(c.sequence) + 1, token / 4);
  best.add(level_of(score + gumbel(word_of(words, token))), token);
}

// Every CTA adds its tallies to the sums of all; the choosing one gets them in the place of its own, and clears them: who
// adds next has taken a verdict that was published after that. False: give up.
__device__ __forceinline__ bool add_up(const Choice& c) {
  u64* sums = c.words() + CHOICE_SUMS;
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) {
    const uint4 own = c.shared.tallies[i];
    if (own.x == 0) continue;
    add_relaxed_gpu(sums + 2 * i, static_cast<u64>(own.x));
    add_relaxed_gpu(sums + 2 * i + 1, mass_of(own));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (c.thread() == 0) {
    fence_gpu();  // with the barrier, behind everybody's additions
    c.give_pair(c.own() + CHOICE_ARRIVED, 0, 0);
  }
  if (!c.chooses) return true;
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    u32 nothing;
    ok = c.take_pair(c.block(cta) + CHOICE_ARRIVED, nothing, nothing);
  }
  fence_gpu();
  if (!c.m.meet(ok)) return false;
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) {
    const u64 count = load_relaxed_gpu(sums + 2 * i), mass = load_relaxed_gpu(sums + 2 * i + 1);
    store_relaxed_gpu(sums + 2 * i, 0ull);
    store_relaxed_gpu(sums + 2 * i + 1, 0ull);
    c.shared.tallies[i] = make_uint4(static_cast<u32>(count), static_cast<u32>(mass & 0x3fff),
                                     static_cast<u32>(mass >> 14 & 0x3fff), static_cast<u32>(mass >> 28));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// All threads of all CTAs get `verdict` of the choosing one's thread 0. Ends with a meeting. False: give up.
__device__ __forceinline__ bool share_verdict(Choice& c, u32& verdict) {
  bool ok = true;
  if (c.thread() == 0) {
    if (c.chooses) {
      fence_gpu();
      c.give_pair(c.words() + CHOICE_VERDICT, verdict, 0);
    } else {
      u32 nothing;
      ok = c.take_pair(c.words() + CHOICE_VERDICT, verdict, nothing);
      fence_gpu();
    }
    c.shared.verdict = verdict;
  }
  if (!c.m.meet(ok)) return false;
  verdict = c.shared.verdict;
  c.round++;
  return true;
}

// Looks among the tokens up to the present cut for the goal's, and leaves the new cut in shared memory; if there are fewer
// all are kept. Begins and ends with a meeting. False: give up.
__device__ __forceinline__ bool find_cut(Choice& c, const Source& rows, u32 goal) {
  Search& search = c.shared.search;
  const bool by_mass = goal == TOP_P;
  u64 prefix = 0;
  u32 shift = ORDER_BITS, verdict = 0;
#pragma unroll 1
  do {
    shift -= RADIX_BITS;
    clear_tallies(c);
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    rows.each([&](float value, u32 token) {
      const u64 order = order_of(level_of(value), token);
      if (order > search.cut || order >> shift >> RADIX_BITS != prefix) return;
      add_tally(c, static_cast<u32>(order >> shift) % RADIX, by_mass ? weight_of(value, c.shared.tops[SCORES]) : 0);
    });
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    if (!add_up(c)) return false;
    c.round++;
    if (c.chooses && c.warp() == 0) {
      find_crossing(c, by_mass, [&](u64 mass) {
        if (shift < ORDER_BITS - RADIX_BITS) return search.want;
        return by_mass ? part_of(c.sampling().top_p, mass) : static_cast<u64>(c.sampling().top_k);
      });
    }
    __syncwarp();
    if (c.thread() == 0) verdict = search.digit | (search.last || shift == 0) << 8 | search.found << 9;
    if (!share_verdict(c, verdict)) return false;
    prefix = prefix << RADIX_BITS | verdict % RADIX;
  } while (verdict >> 8 == 2);
  if (c.thread() == 0 && verdict >> 9) search.cut = ((prefix + 1) << shift) - 1;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// All consumers of all CTAs, for one sequence, whose token is drawn too. False: give up.
__device__ __forceinline__ bool look_together(const Machine& m, u32 sequence, bool chooses) {
  Choice c = choice_of(m, sequence, chooses);
  ChoiceShared& shared = c.shared;
  const Source rows = rows_of(c, m.shared.tasks()[m.phase - 1], SCORES);
  c.round = 1;  // before is the head's
  if (c.thread() == 0) shared.search.cut = NO_LIMIT;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll 1
  for (u32 goal = TOP_K; goal < GOALS; goal++)
    if (has_goal(c.sampling(), goal) && !find_cut(c, rows, goal)) return false;
  Best best{NO_LEVEL, NO_TOKEN};
  rows.each([&](float score, u32 token) {
    if (order_of(level_of(score), token) > shared.search.cut || score - shared.tops[SCORES] < c.sampling().least) return;
    draw_one(c, score, token, best);
  });
  note_best(c, best);
  if (c.warp() == 0) {
    best = best_of(shared.bests[0]);
    if (c.lane() == 0) c.give_pair(c.own() + CHOICE_BEST, best.level, best.token);
  }
  bool ok = true;
  if (chooses) {
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    best = {NO_LEVEL, NO_TOKEN};
#pragma unroll 1
    for (u32 cta = c.thread(); ok && cta < m.header.ctas; cta += CONSUMERS) {
      u32 level, token;
      ok = c.take_pair(c.block(cta) + CHOICE_BEST, level, token);
      if (ok) best.add(level, token);
    }
    if (!m.meet(ok)) return false;
    note_best(c, best);
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}
