// A token chosen with filters or log probabilities: by one CTA from what all have listed with the head.
//
// Tokens that are not listed come after the last one that each CTA lists, and what is listed beyond a threshold is left out.
// So a cut before all of those is exact, whatever lies behind. The mass of all tokens is known but for the rounding of the
// CTAs' own: a cut by mass must be the same at both ends of what it may be. Where that is not so, which is seldom unless the
// distribution is flat, all CTAs are called to look together (together.cuh). The likeliest tokens always are in the lists.
#pragma once

#include "phases/choose/members.cuh"

// How many tokens at least are to become members; 0: it does not depend on how many.
__device__ __forceinline__ u32 members_wanted(const Choice& c, u32 of) {
  const Sampling& sampling = c.sampling();
  if (of == LOGITS) return sampling.logprobs > 0 ? sampling.logprobs - 1 : 0;
  if (sampling.top_k > 0) return sampling.top_k;
  // Of 132 CTAs' first tokens the 123rd: some 350 tokens.
  return sampling.flags & CHOOSE_TOP_P ? c.m.header.ctas / 16 * 15 : 0;
}

// All CTAs' highest values, thresholds and masses. `none`: there is no token to choose. False: give up.
__device__ __forceinline__ bool take_tops(const Choice& c, bool& none) {
  ChoiceShared& shared = c.shared;
  const u32 ctas = c.m.header.ctas;
  Best best{NO_LEVEL, NO_TOKEN};
  u32 logit = NO_LEVEL;
  bool ok = true;
  if (c.thread() < 2) {
    shared.thresholds[c.thread()] = NO_LIMIT;
    shared.listed[c.thread()] = 0;
  }
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < ctas; cta += CONSUMERS) {
    u32 level, token, highest, likeliest;
    ok = c.take_pair(c.block(cta) + CHOICE_TOP, level, token) && c.take_pair(c.block(cta) + CHOICE_TOP + 2, highest, likeliest);
    if (!ok) break;
    best.add(level, token);
    logit = max(logit, highest);
    shared.firsts[SCORES][cta] = order_of(level, token);
    shared.firsts[LOGITS][cta] = order_of(highest, likeliest);
  }
  __syncwarp();
  best.add_warp();
  logit = warp_max(logit);
  if (c.lane() == 0) {
    shared.bests[0][c.warp()] = best;
    shared.levels[c.warp()] = logit;
  }
  if (!c.m.meet(ok)) return false;
  const Best top = best_of(shared.bests[0]);
  none = top.level == FAILED_LEVEL || top.token == NO_TOKEN;
  logit = warp_max(c.lane() < MK_WARPS ? shared.levels[c.lane()] : NO_LEVEL);
  if (c.thread() == 0) {
    shared.tops[SCORES] = value_of(top.level);
    shared.tops[LOGITS] = value_of(logit);
    shared.outcomes[c.sequence] = outcome_of(top);
  }
  if (none) return true;
#pragma unroll 1
  for (u32 of = SCORES; of <= LOGITS; of++) {
    const u32 wanted = members_wanted(c, of);
    if (wanted > 0 && (of == LOGITS || c.filtered())) find_threshold(c, of, wanted);
    if (!has_mass(c.sampling(), of)) continue;
    const float highest = value_of(of == SCORES ? top.level : logit);
    u64 mass = 0;
#pragma unroll 1
    for (u32 cta = c.thread(); ok && cta < ctas; cta += CONSUMERS) {
      u32 low = 0, high = 0;
      ok = c.take_pair(c.block(cta) + CHOICE_MASS + 2 * of, low, high);
      const u64 own = static_cast<u64>(high) << 32 | low;
      if (!ok || own == 0) continue;
      mass += static_cast<u64>(__fmul_rn(static_cast<float>(own), exp_of(value_of(level_at(shared.firsts[of][cta])) - highest)));
    }
    __syncwarp();
    mass = warp_sum_long(mass);
    if (c.lane() == 0) shared.sums[of][c.warp()] = mass;
  }
  return c.m.meet(ok);
}

// Of all tokens, about, after take_tops.
__device__ __forceinline__ u64 mass_of_all(const Choice& c, u32 of) {
  return warp_sum_long(c.lane() < MK_WARPS ? c.shared.sums[of][c.lane()] : 0);
}

// What is collected of a kind of values: all listed that can matter, by a threshold or by min-p. False: give up.
__device__ __forceinline__ bool collect_members(const Choice& c, u32 of) {
  const bool by_value = of == SCORES && members_wanted(c, SCORES) == 0;
  if (c.thread() == 0) c.shared.search.cut = NO_LIMIT;
  return c.m.meet(collect(c, of, by_value ? c.sampling().least : minus_infinity()));
}

// The choosing CTA looks for the cut of the scores among its members. False: they do not decide.
__device__ __forceinline__ bool find_in_members(const Choice& c) {
  const Sampling& sampling = c.sampling();
  ChoiceShared& shared = c.shared;
  Search& search = shared.search;
  const u32 top_k = sampling.top_k;
  const bool weigh = has_goal(sampling, TOP_P);
  const float top = shared.tops[SCORES];
  const u32 count = shared.listed[SCORES];
  if (count > MEMBER_ROOM) return false;
  if (weigh) {
#pragma unroll 1
    for (u32 i = c.thread(); i < count; i += CONSUMERS)
      shared.members[i].weight = weight_of(value_of(level_at(shared.members[i].order)), top);
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  // All tokens up to the horizon are members. Of those behind it none is wanted if min-p drops them.
  const u64 horizon = min(shared.thresholds[SCORES], warp_min_long(c.lane() < MK_WARPS ? shared.floors[c.lane()] : NO_LIMIT));
  const bool whole = horizon == NO_LIMIT, sure = whole || value_of(level_at(horizon)) - top < sampling.least;
  bool open = !weigh && top_k == 0 && !sure;
#pragma unroll 1
  for (u32 goal = TOP_K; goal < GOALS && !open; goal++) {
    if (!has_goal(sampling, goal)) continue;
    const bool by_mass = goal == TOP_P, exact = whole || top_k > 0, shares = weigh && !by_mass;
    u64 all = count, error = 0, want = top_k;
    if (by_mass) {
      all = exact ? measure_up_to(c, shared.members, count, true, search.cut) : mass_of_all(c, SCORES);
      error = exact ? 0 : (all >> MASS_BITS) + 1;
      want = part_of(sampling.top_p, all + error);
    }
    const u64 slack = by_mass ? want - part_of(sampling.top_p, all - error) : 0;
    if (by_mass && top_k > 0) barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // all have read what was found before
    // All are kept if there are fewer, or if p of all is rounded to more.
    if (exact && want > all) {
      open = !whole && (shares || !sure);
    } else {
      // A mass to be shared further must be that of what is kept.
      open = !find_member(c, count, by_mass, want, slack) || (search.cut > horizon && (shares || !sure));
    }
  }
  return !open;
}

// One of the members up to the cut is drawn.
__device__ __forceinline__ void draw_member(const Choice& c) {
  ChoiceShared& shared = c.shared;
  const u32 count = shared.listed[SCORES];
  const u64 cut = shared.search.cut;
  const float top = shared.tops[SCORES], least = c.sampling().least;
  Best best{NO_LEVEL, NO_TOKEN};
#pragma unroll 1
  for (u32 i = c.thread(); i < count; i += CONSUMERS) {
    const u64 order = shared.members[i].order;
    const float score = value_of(level_at(order));
    if (order <= cut && !(score - top < least)) draw_one(c, score, token_at(order), best);
  }
  note_best(c, best);
}

// Tells the host the token's log probability, and those of the likeliest tokens. Every word carries its own tag and the host
// looks at each, so it does not matter in which order they and the token's word become visible. False: give up.
__device__ __forceinline__ bool report(const Choice& c) {
  const Machine& m = c.m;
  ChoiceShared& shared = c.shared;
  const u32 row = c.token() * SEQUENCES + c.sequence, tag = c.token() + 1, named = c.sampling().logprobs - 1;
  u64* words = m.launch.choosing.reports + static_cast<u64>(row) * REPORT_WORDS;
  const float top = shared.tops[LOGITS];
  const u64 mass = mass_of_all(c, LOGITS);
  const float log_mass = log_of(split(__fmul_rn(static_cast<float>(mass), 1.0f / WEIGHT_ONE)));
  bool ok = true;
  // The token's logit lies where its owner stored it.
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < m.header.ctas; cta += CONSUMERS) {
    u32 nothing;
    ok = c.take_pair(c.block(cta) + CHOICE_STORED, nothing, nothing);
  }
  fence_gpu();
  if (!m.meet(ok)) return false;
  if (c.thread() == 0) {
    const u64 at = static_cast<u64>(c.sequence) * m.launch.logit_stride + shared.outcomes[c.sequence];
    const float logit = __uint_as_float(load_relaxed_gpu(reinterpret_cast<const u32*>(m.launch.logits) + at));
    store_relaxed_sys(words, tagged(__float_as_uint((logit - top) - log_mass), tag));
  }
  const u32 count = named == 0 ? 0 : shared.listed[LOGITS];
#pragma unroll 1
  for (u32 i = c.thread(); i < count; i += CONSUMERS) {
    const u64 order = shared.members[i].order;
    u32 rank = 0;
#pragma unroll 4
    for (u32 j = 0; j < count; j++) rank += shared.members[j].order < order;
    if (rank >= named) continue;
    store_relaxed_sys(words + 1 + 2 * rank, tagged(token_at(order), tag));
    store_relaxed_sys(words + 2 + 2 * rank, tagged(__float_as_uint((value_of(level_at(order)) - top) - log_mass), tag));
  }
  return true;
}

// The CTAs that do not choose wait until the token is there, or they are called: then `sequence` says for which. False: give up.
__device__ __forceinline__ bool await_call(const Choice& c, u32& sequence) {
  const Machine& m = c.m;
  bool ok = true;
  if (c.thread() == 0) {
    const u32 base = c.token() * SEQUENCES + sequence, word = m.header.token_word, want = m.tag();
    u32 called = SEQUENCES;
    ok = spin(m.watch, Wait::CHOICE, static_cast<u32>(CHOICE_CALL), base + 1, [&](u64& seen) {
      const Pair got = load_relaxed_gpu(reinterpret_cast<const Pair*>(m.launch.choosing.words + CHOICE_CALL));
      const u32 number = static_cast<u32>(got.first >> 32);
      seen = number;
      if (number <= base || got.second >> 32 != number) return load_relaxed_gpu(m.launch.exchange + word) >> 32 == want;
      called = number - base + sequence - 1;
      c.shared.tops[SCORES] = value_of(static_cast<u32>(got.first));
      return true;
    });
    c.shared.verdict = called;
  }
  if (!m.meet(ok)) return false;
  sequence = c.shared.verdict;
  return true;
}

__device__ __forceinline__ void call_all(const Choice& c, u32 sequence) {
  u64* call = c.m.launch.choosing.words + CHOICE_CALL;
  const u32 number = c.token() * SEQUENCES + sequence + 1;
  publish(call, level_of(c.shared.tops[SCORES]), number);
  publish(call + 1, 0, number);
}

// All consumers of all CTAs; the choosing one's outcomes lie in its shared memory then, for its first warp. False: give up.
__device__ __forceinline__ bool choose_in_rounds(const Machine& m, bool chooses) {
#pragma unroll 1
  for (u32 sequence = 0; sequence < SEQUENCES; sequence++) {
    bool none = false, open = true;
    if (!chooses) {
      if (!await_call(choice_of(m, sequence, false), sequence)) return false;
      if (sequence >= SEQUENCES) break;
    }
    const Choice c = choice_of(m, sequence, chooses);
    if (chooses && !take_tops(c, none)) return false;
#pragma unroll 1
    for (u32 of = SCORES; of <= LOGITS && !none; of++) {
      if (chooses) {
        if (of == SCORES ? !c.filtered() : c.sampling().logprobs == 0) continue;
        if (of == LOGITS && c.filtered()) barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // the scores' members are done with
        if (!collect_members(c, of)) return false;
        if (of == LOGITS) {
          if (!report(c)) return false;
          continue;
        }
        open = !find_in_members(c);
        if (!open) draw_member(c);
        if (open && c.thread() == 0) call_all(c, sequence);
      }
      if (open && !look_together(m, sequence, chooses)) return false;
      if (!chooses) break;
    }
    if (SEQUENCES > 1 && chooses) barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  __syncwarp();
  return true;
}
