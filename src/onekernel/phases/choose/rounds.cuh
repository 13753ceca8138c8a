// A token chosen with filters or log probabilities: by one CTA from what all have listed with the head.
//
// Tokens that are not listed come after the last one that each CTA lists. So a cut before all of those is exact, whatever
// lies behind. The mass of all tokens is known but for the rounding of the CTAs' own: a cut by mass must be the same at both
// ends of what it may be. Where that is not so, which is seldom unless the distribution is flat, all CTAs are called to look
// together (together.cuh).
#pragma once

#include "phases/choose/lists.cuh"
#include "phases/choose/together.cuh"

// The mass of all tokens is at most its 2**17th part from the sum of the CTAs' masses, each scaled from the CTA's own
// highest value to the highest of all: that is two exponentials of 3e-7 each, two differences of at most 28 (what is
// further below weighs less than one unit) rounded to 2**-24 of their size, and a unit for each of up to 2**20 tokens.
constexpr u32 MASS_BITS = 17;

// All CTAs' highest score and its token, or `none`; leaves both values' tops in shared memory. False: give up.
__device__ __forceinline__ bool take_tops(const Choice& c, bool& none) {
  ChoiceShared& shared = c.shared;
  Best best{NO_LEVEL, NO_TOKEN};
  u32 logit = NO_LEVEL;
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    u32 level, token, highest, nothing;
    ok = c.take_pair(c.block(cta) + CHOICE_TOP, level, token) && c.take_pair(c.block(cta) + CHOICE_TOP + 2, highest, nothing);
    if (!ok) break;
    best.add(level, token);
    logit = max(logit, highest);
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
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// Adds up the CTAs' masses, as far as this warp's threads take them. False: give up.
__device__ __forceinline__ bool take_masses(const Choice& c, u32 of) {
  u64 mass = 0;
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    const u64* block = c.block(cta);
    u32 low = 0, high = 0;
    ok = c.take_pair(block + CHOICE_MASS + 2 * of, low, high);
    const u64 own = static_cast<u64>(high) << 32 | low;
    if (!ok || own == 0) continue;
    const float top = value_of(static_cast<u32>(load_relaxed_gpu(block + CHOICE_TOP + 2 * of)));
    mass += static_cast<u64>(__fmul_rn(static_cast<float>(own), exp_of(top - c.shared.tops[of])));
  }
  __syncwarp();
  mass = warp_sum_long(mass);
  if (c.lane() == 0) c.shared.sums[c.warp()] = mass;
  return ok;
}

enum Step : u32 { TALLY, EDGE, KEPT };

// Goes through what all CTAs have listed: tallies it by bins and notes what is listed last (TALLY), or collects the tokens up
// to the cut of the bin that was found (EDGE), or of all bins that min-p keeps too (KEPT). `weigh`: with masses. False: give up.
__device__ __forceinline__ bool scan(const Choice& c, u32 of, Step step, bool weigh) {
  constexpr u32 AT_ONCE = 3, CTA_PAIRS = LISTED / 2;
  ChoiceShared& shared = c.shared;
  const u64* words = c.block(0) + CHOICE_LISTS + of * LISTED;
  const u32 pairs = c.m.header.ctas * CTA_PAIRS, tag = c.entry_tag();
  const float top = shared.tops[of], least = of == SCORES ? c.sampling().least : minus_infinity();
  u64 floor = NO_LIMIT;
  bool ok = true;
#pragma unroll 1
  for (u32 first = c.thread(); ok && first < pairs; first += CONSUMERS * AT_ONCE) {
    Pair got[AT_ONCE] = {};
    ok = spin(c.m.watch, Wait::CHOICE, static_cast<u32>(words - c.m.launch.choosing.words) + first, tag, [&](u64& seen) {
      bool ready = true;
#pragma unroll
      for (u32 n = 0; n < AT_ONCE; n++) {
        const u32 pair = first + n * CONSUMERS;
        if (pair >= pairs) continue;
        got[n] = load_relaxed_gpu(reinterpret_cast<const Pair*>(words + pair / CTA_PAIRS * CHOICE_CTA_WORDS + pair % CTA_PAIRS * 2));
        const u32 low = static_cast<u32>(got[n].first) >> TOKEN_BITS, high = static_cast<u32>(got[n].second) >> TOKEN_BITS;
        if (low == tag && high == tag) continue;
        ready = false;
        seen = low == tag ? high : low;
      }
      return ready;
    });
    if (!ok) break;
    // One entry after the other, each from the same registers: cold code costs what it is long.
#pragma unroll 1
    for (u32 n = 0; n < 2 * AT_ONCE; n++) {
      const u64 entry = got[0].first;
      const bool last = n % 2 == 1 && (first + n / 2 * CONSUMERS) % CTA_PAIRS == CTA_PAIRS - 1;
      got[0].first = got[0].second;
#pragma unroll
      for (u32 k = 0; k + 1 < AT_ONCE; k++) {
        got[k].second = got[k + 1].first;
        got[k + 1].first = got[k + 1].second;
      }
      const u32 level = static_cast<u32>(entry >> 32);
      if (level == NO_LEVEL) continue;
      const u64 order = order_of(level, static_cast<u32>(entry) % (1u << TOKEN_BITS));
      const float value = value_of(level);
      const u32 bin = bin_of(value, top);
      if (last) floor = min(floor, order);
      if (step == TALLY) {
        add_tally(c, bin, weigh ? weight_of(value, top) : 0);
        continue;
      }
      if (order > shared.search.cut[of] || (step == EDGE ? bin != shared.search.digit : value - top < least)) continue;
      const u32 at = fetch_add_cta(&shared.listed, 1);
      if (step == EDGE && at < EDGE_ROOM) shared.edge[at] = {order, weigh ? weight_of(value, top) : 0};
      if (step == KEPT && at < KEPT_ROOM) shared.kept[at] = order;
    }
  }
  __syncwarp();
  floor = warp_min_long(floor);
  if (c.lane() == 0) shared.floors[c.warp()] = floor;
  return ok;
}

// One warp: the bin in which the lists reach a goal. `kept`: the mass of what is kept so far; `floor`: what is not listed comes
// after it.
__device__ __forceinline__ void find_edge(const Choice& c, u32 of, u32 goal, u64 kept, u64 floor) {
  const Sampling& sampling = c.sampling();
  Search& search = c.shared.search;
  const bool ranked = has_goal(sampling, of, TOP_K);
  u64 slack = 0;
  __syncwarp();
  if (c.lane() == 0) search.mass = 0;
  __syncwarp();
  find_crossing(c, goal == TOP_P, [&](u64 listed) {
    if (goal != TOP_P) return static_cast<u64>(of == LOGITS ? sampling.logprobs - 1 : sampling.top_k);
    const bool exact = ranked || floor == NO_LIMIT;
    const u64 all = ranked ? kept : exact ? listed : c.shared.mass, error = exact ? 0 : (all >> MASS_BITS) + 1;
    const u64 want = part_of(sampling.top_p, all + error);
    slack = want - part_of(sampling.top_p, all - error);
    return want;
  });
  __syncwarp();
  if (c.lane() == 0) {
    search.slack = slack;
    search.last = c.shared.listed = 0;
  }
}

// Of the edge's tokens the last that is kept, if it is sure which: by the thread that has it.
__device__ __forceinline__ void cut_edge(const Choice& c, u32 of, u32 goal) {
  ChoiceShared& shared = c.shared;
  Search& search = shared.search;
  const u32 count = shared.listed;
  const u64 want = search.want, slack = search.slack, before_bin = search.mass;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll 1
  for (u32 at = c.thread(); count <= EDGE_ROOM && at < count; at += CONSUMERS) {
    const Member mine = shared.edge[at];
    u32 rank = 0;
    u64 before = 0;
#pragma unroll 4
    for (u32 i = 0; i < count; i++) {
      const Member other = shared.edge[i];
      if (other.order < mine.order) rank++, before += other.weight;
    }
    if (goal == TOP_P ? before + slack >= want || before + mine.weight < want : rank + 1 != want) continue;
    search.cut[of] = mine.order;
    search.mass = before_bin + before + mine.weight;
    search.last = 1;
  }
}

// The choosing CTA looks for the cut of one kind of values in the lists, and collects the places up to it; sets `open` if they
// do not decide. With `step` KEPT the cut is known. False: give up.
__device__ __forceinline__ bool look_in_lists(const Choice& c, u32 of, Step step, bool& open) {
  const Sampling& sampling = c.sampling();
  ChoiceShared& shared = c.shared;
  Search& search = shared.search;
  const bool weigh = has_goal(sampling, of, TOP_P);
  const bool only_mass = of == LOGITS && !has_goal(sampling, of, LIKELIEST);  // for the chosen token's log probability
  u32 goal = TOP_K;
  u64 floor = NO_LIMIT;
  bool sure = true, ok = true;  // sure: nothing is wanted of what is not listed
  if (step == TALLY) {
    clear_tallies(c);
    if (c.thread() == 0) search.cut[of] = NO_LIMIT;
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    ok = take_masses(c, of);
  } else if (c.thread() == 0) {
    shared.listed = 0;
  }
#pragma unroll 1
  for (bool collected = false; !collected && !open;) {
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    ok = scan(c, of, step, weigh) && ok;
    if (!c.m.meet(ok)) return false;
    if (step == KEPT) {
      open = shared.listed > KEPT_ROOM;
      collected = true;
      continue;
    }
    if (step == TALLY) {
      floor = warp_min_long(c.lane() < MK_WARPS ? shared.floors[c.lane()] : NO_LIMIT);
      const u64 about = warp_sum_long(c.lane() < MK_WARPS ? shared.sums[c.lane()] : 0);
      if (c.thread() == 0) shared.mass = about;
      sure = only_mass || floor == NO_LIMIT || (of == SCORES && value_of(level_at(floor)) - shared.tops[of] < sampling.least);
    } else {
      cut_edge(c, of, goal++);
      barrier_sync(CONSUMER_BARRIER, CONSUMERS);
      const bool unclear = !search.last, beyond = search.cut[of] > floor;
      if (!unclear && !beyond) sure = true;
      // A mass to be shared further must be that of what is kept.
      open = unclear || !sure || (beyond && goal == TOP_P && weigh);
    }
    // The next goal that the lists reach.
    bool found = false;
#pragma unroll 1
    for (; !open && goal < GOALS; goal++) {
      if (!has_goal(sampling, of, goal)) continue;
      barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // all have read what was found before
      if (c.warp() == 0) find_edge(c, of, goal, search.mass, floor);
      barrier_sync(CONSUMER_BARRIER, CONSUMERS);
      found = search.found;
      if (found) break;
      open = !sure || (goal == TOP_K && weigh && floor != NO_LIMIT);
    }
    open |= !found && !sure;
    step = found ? EDGE : KEPT;
    collected = only_mass;
    if (c.thread() == 0) shared.listed = 0;
  }
  return true;
}

// Tells the host the token's log probability, and those of the tokens up to the cut. Every word carries its own tag and the
// host looks at each, so it does not matter in which order they and the token's word become visible.
__device__ __forceinline__ void report(const Choice& c, u32 listed) {
  const Machine& m = c.m;
  ChoiceShared& shared = c.shared;
  const u32 row = c.token() * SEQUENCES + c.sequence, tag = c.token() + 1;
  u64* words = m.launch.choosing.reports + static_cast<u64>(row) * REPORT_WORDS;
  const float top = shared.tops[LOGITS];
  const float log_mass = log_of(split(__fmul_rn(static_cast<float>(shared.mass), 1.0f / WEIGHT_ONE)));
  if (c.thread() == 0) {
    fence_gpu();
    const u64 at = static_cast<u64>(c.sequence) * m.launch.logit_stride + shared.outcomes[c.sequence];
    const float logit = __uint_as_float(load_relaxed_gpu(reinterpret_cast<const u32*>(m.launch.logits) + at));
    store_relaxed_sys(words, tagged(__float_as_uint((logit - top) - log_mass), tag));
  }
  if (c.thread() >= listed) return;
  const u64 order = shared.kept[c.thread()];
  u32 rank = 0;
#pragma unroll 4
  for (u32 i = 0; i < listed; i++) rank += shared.kept[i] < order;
  store_relaxed_sys(words + 1 + 2 * rank, tagged(token_at(order), tag));
  store_relaxed_sys(words + 2 + 2 * rank, tagged(__float_as_uint((value_of(level_at(order)) - top) - log_mass), tag));
}

// The CTAs that do not choose wait until the token is there, or they are called: then `item` says for what. False: give up.
__device__ __forceinline__ bool await_call(const Choice& c, u32& item) {
  const Machine& m = c.m;
  bool ok = true;
  if (c.thread() == 0) {
    const u32 base = c.token() * 2 * SEQUENCES + item, word = m.header.token_word, want = m.tag();
    u32 called = 2 * SEQUENCES;
    ok = spin(m.watch, Wait::CHOICE, static_cast<u32>(CHOICE_CALL), base + 1, [&](u64& seen) {
      const Pair got = load_relaxed_gpu(reinterpret_cast<const Pair*>(m.launch.choosing.words + CHOICE_CALL));
      const u32 number = static_cast<u32>(got.first >> 32);
      seen = number;
      if (number <= base || got.second >> 32 != number) return load_relaxed_gpu(m.launch.exchange + word) >> 32 == want;
      called = number - base + item - 1;
      c.shared.tops[SCORES] = value_of(static_cast<u32>(got.first));
      return true;
    });
    c.shared.verdict = called;
  }
  if (!m.meet(ok)) return false;
  item = c.shared.verdict;
  return true;
}

__device__ __forceinline__ void call_all(const Choice& c, u32 item) {
  u64* call = c.m.launch.choosing.words + CHOICE_CALL;
  const u32 number = c.token() * 2 * SEQUENCES + item + 1;
  publish(call, level_of(c.shared.tops[SCORES]), number);
  publish(call + 1, 0, number);
}

// What follows from the places that are kept: a token is drawn of the scores', and the logits' are reported.
__device__ __forceinline__ void use_kept(const Choice& c, u32 of) {
  const u32 listed = c.shared.listed;
  if (of == LOGITS) {
    report(c, c.sampling().logprobs > 1 ? listed : 0);
    return;
  }
  Best best{NO_LEVEL, NO_TOKEN};
#pragma unroll 1
  for (u32 i = c.thread(); i < listed; i += CONSUMERS)
    draw_one(c, value_of(level_at(c.shared.kept[i])), token_at(c.shared.kept[i]), best);
  note_best(c, best);
}

// All consumers of all CTAs; the choosing one's outcomes lie in its shared memory then. An item is a sequence's scores or its
// logits. False: give up.
__device__ __forceinline__ bool choose_in_rounds(const Machine& m, bool chooses) {
  Step step = TALLY;
  u32 item = 0;
#pragma unroll 1
  while (item < 2 * SEQUENCES) {
    const Choice c = choice_of(m, item / 2, chooses);
    const u32 of = item % 2;
    if (!chooses) {
      if (!await_call(c, item)) return false;
      if (item >= 2 * SEQUENCES) continue;
    } else {
      if (of == SCORES) {
        bool none = false;
        if (!take_tops(c, none)) return false;
        if (none) {
          item += 2;
          continue;
        }
      }
      bool open = false;
      if (of == SCORES ? c.filtered() : c.sampling().logprobs > 0) {
        if (!look_in_lists(c, of, step, open)) return false;
        if (!open) use_kept(c, of);
        barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // what comes next begins in the same shared memory
      }
      step = TALLY;
      if (!open) {
        item++;
        continue;
      }
      if (c.thread() == 0) call_all(c, item);
    }
    if (!look_together(m, item / 2, chooses, item % 2)) return false;
    // The token is drawn then; of logits the cut is known.
    if (!chooses || of == SCORES) item++;
    if (chooses && of == LOGITS) step = KEPT;
  }
  return true;
}
