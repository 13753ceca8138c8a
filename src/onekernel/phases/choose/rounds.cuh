// A token chosen by all CTAs together, for filters and log probabilities.
//
// Round 0: everybody learns the highest score. Round 1: each CTA lists its likeliest tokens, as many whole bins of 1/8 as
// LISTED takes, and the mass of all its tokens. The choosing CTA looks for the cuts in the lists; tokens that are not
// listed lie below the last bin that all CTAs have listed. If a cut may lie there too, the verdict of round 2 is that all
// look for it together, in their rows: a digit of the places at a time, four for most distributions, seven at most.
#pragma once

#include "phases/choose/cut.cuh"

enum Goal : u32 { TOP_K, TOP_P, LIKELIEST, GOALS };

// All CTAs' highest score and its token; leaves both values' tops in shared memory. False: give up.
__device__ __forceinline__ bool take_tops(const Choice& c, Best& top) {
  ChoiceShared& shared = c.shared;
  Best best{NO_LEVEL, NO_TOKEN};
  u32 logit = NO_LEVEL;
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    u32 score, token, highest, nothing;
    ok = c.take_pair(c.block(cta) + CHOICE_TOP, score, token) && c.take_pair(c.block(cta) + CHOICE_TOP + 2, highest, nothing);
    if (!ok) break;
    best.add(score, token);
    logit = max(logit, highest);
  }
  __syncwarp();
  best.add_warp();
  logit = warp_max(logit);
  if (c.lane() == 0) {
    shared.bests[0][c.warp()] = best;
    shared.logits[c.warp()] = logit;
  }
  if (!c.m.meet(ok)) return false;
  top = best_of(shared.bests[0]);
  logit = warp_max(c.lane() < MK_WARPS ? shared.logits[c.lane()] : NO_LEVEL);
  if (c.thread() == 0) {
    shared.tops[SCORES] = value_of(top.level);
    shared.tops[LOGITS] = value_of(logit);
    shared.outcomes[c.sequence] = outcome_of(top);
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// Lists the CTA's tokens: those up to the cut, of which there are at most LISTED, or (`by_bin`) the likeliest bins.
__device__ __forceinline__ void give_list(const Choice& c, u32 of, bool by_bin) {
  ChoiceShared& shared = c.shared;
  if (c.thread() == 0) {
    shared.listed = 0;
    shared.search.want = LISTED + 1;
  }
  tally(c, of, rows_of(c, of), 0, BY_BIN);
  if (c.warp() == 0) find_crossing(c, false, 0);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const u32 bound = shared.search.found ? shared.search.digit : RADIX;
  const Source rows = rows_of(c, of);
  u64* words = c.own() + CHOICE_LISTS + of * CHOICE_LIST_WORDS;
  rows.each([&](float value, u32 token) {
    if (by_bin ? bin_of(value, rows.top) >= bound : place_of(value, token, rows.top) > shared.search.cut[of]) return;
    c.give_pair(words + 4 + 2 * fetch_add_cta(&shared.listed, 1), __float_as_uint(value), token);
  });
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll 1
  for (u32 i = shared.listed + c.thread(); i < LISTED; i += CONSUMERS)
    c.give_pair(words + 4 + 2 * i, __float_as_uint(minus_infinity()), NO_TOKEN);
  if (c.thread() == 0) {
    fence_gpu();  // the choosing CTA reads the logit of the token it chooses where the owner has stored it
    c.give_pair(words, bound, 0);
    c.give_pair(words + 2, static_cast<u32>(shared.total), static_cast<u32>(shared.total >> 32));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
}

// The choosing CTA waits for all of a list, and adds up the heads of all CTAs' lists. False: give up.
__device__ __forceinline__ bool take_list(const Choice& c, u32 list) {
  constexpr u32 PAIRS = CHOICE_LIST_WORDS / 2;
  const u64* words = c.block(0) + CHOICE_LISTS + list * CHOICE_LIST_WORDS;
  bool ok = true;
#pragma unroll 1
  for (u32 i = c.thread(); ok && i < c.m.header.ctas * PAIRS; i += CONSUMERS * 4) {
    ok = spin(c.m.watch, Wait::CHOICE, static_cast<u32>(words - c.m.launch.choosing.words) + i, c.tag(), [&](u64& seen) {
      bool ready = true;
#pragma unroll
      for (u32 n = 0; n < 4; n++) {
        const u32 pair = i + n * CONSUMERS;
        if (pair >= c.m.header.ctas * PAIRS) continue;
        const u64* at = words + pair / PAIRS * CHOICE_CTA_WORDS + pair % PAIRS * 2;
        const Pair got = load_relaxed_gpu(reinterpret_cast<const Pair*>(at));
        if (got.first >> 32 == c.tag() && got.second >> 32 == c.tag()) continue;
        ready = false;
        seen = got.first >> 32 == c.tag() ? got.second >> 32 : got.first >> 32;
      }
      return ready;
    });
  }
  fence_gpu();
  if (!c.m.meet(ok)) return false;
  if (c.warp() == 0) {
    u32 bound = RADIX;
    u64 mass = 0;
#pragma unroll 1
    for (u32 cta = c.lane(); cta < c.m.header.ctas; cta += WARP) {
      const u64* at = words + cta * CHOICE_CTA_WORDS;
      bound = min(bound, static_cast<u32>(load_relaxed_gpu(at)));
      mass += (load_relaxed_gpu(at + 2) & 0xFFFFFFFFu) | load_relaxed_gpu(at + 3) << 32;
    }
#pragma unroll 1
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
      bound = min(bound, shuffle_xor(bound, mask));
      mass += shuffle_xor(mass, mask);
    }
    if (c.lane() == 0) {
      c.shared.bounds[list] = bound;
      c.shared.masses[list] = mass;
    }
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// The best of some threads' draws, as what all of them chose.
__device__ __forceinline__ void note_best(const Choice& c, Best best) {
  __syncwarp();
  best.add_warp();
  if (c.lane() == 0) c.shared.bests[0][c.warp()] = best;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (c.warp() > 0) return;
  best = best_of(c.shared.bests[0]);
  if (c.lane() == 0) c.shared.outcomes[c.sequence] = outcome_of(best);
}

// The best of score + noise among the tokens of a source that are kept; `spread` as in find_cut. False: give up.
__device__ __forceinline__ bool draw(const Choice& c, const Source& source, bool spread) {
  const Sampling& sampling = c.sampling();
  const u32 position = c.m.position(c.sequence) + 1;
  Best best{NO_LEVEL, NO_TOKEN};
  source.each([&](float score, u32 token) {
    if (place_of(score, token, source.top) > c.shared.search.cut[SCORES] || score - source.top < sampling.least) return;
    best.add(level_of(score + gumbel(word_of(philox(sampling.seed, position, token / 4), token))), token);
  });
  note_best(c, best);
  if (!spread) return true;
  if (c.warp() == 0) {
    best = best_of(c.shared.bests[0]);
    if (c.lane() == 0) c.give_pair(c.own() + CHOICE_BEST, best.level, best.token);
  }
  if (!c.chooses) return true;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  best = {NO_LEVEL, NO_TOKEN};
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    u32 sum, token;
    ok = c.take_pair(c.block(cta) + CHOICE_BEST, sum, token);
    if (ok) best.add(sum, token);
  }
  if (!c.m.meet(ok)) return false;
  note_best(c, best);
  return true;
}

// Tells the host the token's log probability, and those of the tokens up to the cut. Every word carries its own tag and the
// host looks at each, so it does not matter in which order they and the token's word become visible.
__device__ __forceinline__ void report(const Choice& c) {
  const Machine& m = c.m;
  ChoiceShared& shared = c.shared;
  const u32 row = c.token() * SEQUENCES + c.sequence, tag = c.token() + 1;
  u64* words = m.launch.choosing.reports + static_cast<u64>(row) * REPORT_WORDS;
  if (c.thread() == 0) shared.listed = 0;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const float top = shared.tops[LOGITS];
  if (c.sampling().logprobs > 1) {
    lists_of(c, LOGITS).each([&](float logit, u32 token) {
      if (place_of(logit, token, top) > shared.search.cut[LOGITS]) return;
      u32* member = shared.members[fetch_add_cta(&shared.listed, 1)];
      member[0] = __float_as_uint(logit);
      member[1] = token;
    });
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const float log_mass = log_of(split(__fmul_rn(static_cast<float>(shared.masses[LOGITS]), 1.0f / WEIGHT_ONE)));
  if (c.thread() == 0) {
    const u64 at = static_cast<u64>(c.sequence) * m.launch.logit_stride + shared.outcomes[c.sequence];
    const float logit = __uint_as_float(load_relaxed_gpu(reinterpret_cast<const u32*>(m.launch.logits) + at));
    store_relaxed_sys(words, tagged(__float_as_uint((logit - top) - log_mass), tag));
  }
  const u32 i = c.thread(), listed = shared.listed;
  if (i >= listed) return;
  const float logit = __uint_as_float(shared.members[i][0]);
  const u64 place = place_of(logit, shared.members[i][1], top);
  u32 rank = 0;
#pragma unroll 1
  for (u32 j = 0; j < listed; j++)
    rank += place_of(__uint_as_float(shared.members[j][0]), shared.members[j][1], top) < place;
  store_relaxed_sys(words + 1 + 2 * rank, tagged(shared.members[i][1], tag));
  store_relaxed_sys(words + 2 + 2 * rank, tagged(__float_as_uint((logit - top) - log_mass), tag));
}

// Looks for the cuts: the choosing CTA in the lists, where `open` gets a bit by Values for what those cannot decide; or all
// (`spread`) for what is open. False: give up.
__device__ __forceinline__ bool look(Choice& c, bool spread, u32& open) {
  const Sampling& sampling = c.sampling();
  ChoiceShared& shared = c.shared;
  const u32 bound = spread ? RADIX : shared.bounds[SCORES];
  const bool filtered = sampling.flags & CHOOSE_FILTERED, all = bound == RADIX;
  bool decided = all || static_cast<float>(bound) / BINS_PER_UNIT > -sampling.least;
  if (c.thread() == 0) {
    shared.search.mass = shared.masses[SCORES];
    if (!spread || open >> LOGITS & 1) shared.search.cut[LOGITS] = NO_LIMIT;
    if (!spread || open >> SCORES & 1) shared.search.cut[SCORES] = NO_LIMIT;
  }
#pragma unroll 1
  for (u32 goal = TOP_K; goal < GOALS; goal++) {
    const u32 of = goal == LIKELIEST ? LOGITS : SCORES;
    if (of == LOGITS ? sampling.logprobs < 2 : !filtered) continue;
    if (spread && !(open >> of & 1)) continue;
    if (goal == TOP_K && sampling.top_k == 0) continue;
    if (goal == TOP_P && (!(sampling.flags & CHOOSE_TOP_P) || (!spread && open >> SCORES & 1))) continue;
    if (c.thread() == 0) {
      Search& search = shared.search;
      search.want = of == LOGITS ? sampling.logprobs - 1 : sampling.top_k;
      if (goal == TOP_P) search.want = static_cast<u64>(ceil(sampling.top_p * static_cast<double>(search.mass)));
      search.mass = 0;
    }
    if (!find_cut(c, of, spread ? rows_of(c, of) : lists_of(c, of), goal == TOP_P, spread)) return false;
    const bool found = shared.search.found;
    if (of == SCORES && found) decided = true;
    if (spread || found) continue;
    // What top-k keeps has a mass that is not known, unless everything is listed.
    if (of == LOGITS ? shared.bounds[LOGITS] < RADIX : goal == TOP_K && !all && sampling.flags & CHOOSE_TOP_P) open |= 1 << of;
  }
  if (!spread && filtered && !decided) open |= 1 << SCORES;
  return true;
}

// All consumers of all CTAs. Leaves the outcome of the choosing one in shared memory. False: give up.
__device__ __forceinline__ bool choose_in_rounds(const Machine& m, u32 sequence, bool chooses) {
  Choice c = choice_of(m, sequence, chooses);
  Best top;
  if (!take_tops(c, top)) return false;
  if (top.level == FAILED_LEVEL || top.token == NO_TOKEN) return true;
  c.round++;
  u32 open = 0;
  // Lists by bins, a look into them, and if something is open: a look of all, and a list of what is to be reported.
#pragma unroll 1
  for (u32 step = 0; step < 4; step++) {
    if (step % 3 == 0) {
#pragma unroll 1
      for (u32 of = step == 0 ? SCORES : LOGITS; of <= LOGITS; of++) {
        const bool needed = of == SCORES ? c.sampling().flags & CHOOSE_FILTERED : c.sampling().logprobs > 0;
        if (step == 0 ? !needed : !(open >> LOGITS & 1)) continue;
        give_list(c, of, step == 0);
        if (chooses && !take_list(c, of)) return false;
        if (step == 3 && c.thread() == 0) c.shared.bounds[of] = RADIX;
      }
      c.round++;
    } else {
      if ((step == 2 || chooses) && !look(c, step == 2, open)) return false;
      if (step == 1 && !share_verdict(c, true, open)) return false;
      if (open == 0) break;
    }
  }
  if (c.sampling().flags & CHOOSE_FILTERED) {
    const bool spread = open >> SCORES & 1;
    if ((spread || chooses) && !draw(c, spread ? rows_of(c, SCORES) : lists_of(c, SCORES), spread)) return false;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (chooses && c.sampling().logprobs > 0) report(c);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // the next sequence's choice begins in the same shared memory
  return true;
}
