// What a CTA gives with the head: its best, and for filters and log probabilities its mass and its likeliest tokens.
#pragma once

#include "phases/choose/choice.cuh"

// Whether a token is drawn of all scores, so that each has its noise.
__device__ __forceinline__ bool is_noisy(const Sampling& sampling) {
  return !(sampling.flags & CHOOSE_FILTERED) && sampling.temperature > 0;
}

// The mass of all tokens is asked for: by top-p, unless top-k has limited them, and by log probabilities.
__device__ __forceinline__ bool has_mass(const Sampling& sampling, u32 of) {
  return of == SCORES ? sampling.flags & CHOOSE_TOP_P && sampling.top_k == 0 : sampling.logprobs > 0;
}

// Leaves the noise of the CTA's rows where their scores will be. It depends on seed, position and token id alone, so it is
// drawn before the head's inputs are there, when all wait. The thread that draws it is the one that adds it.
__device__ __forceinline__ void draw_ahead(const Machine& m, const Task& head) {
  if (m.launch.choosing.mode == CHOOSE_GREEDY) return;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const Choice c = choice_of(m, s, false);
    const Source rows = rows_of(c, head, SCORES);
    float* noise = m.launch.choosing.scores + static_cast<u64>(s) * m.launch.logit_stride + rows.first;
    if (!is_noisy(c.sampling())) continue;
#pragma unroll 1
    for (u32 i = 2 * c.thread(); i < rows.count; i += CONSUMERS * 2) {
      const uint4 words = philox(c.sampling().seed, m.position(s) + 1, (rows.first + i) / 4);  // first rows are even
      const bool second = (rows.first + i) & 2;
      const float pair[2] = {gumbel(second ? words.z : words.x), gumbel(second ? words.w : words.y)};
      noise[i] = pair[0];
      if (i + 1 < rows.count) noise[i + 1] = pair[1];
    }
  }
}

// Scores the CTA's rows, and finds their best: of score + noise if nothing is filtered. `first`: the thread's first pair, by
// Values: of the logits before, of the scores after it. For what is listed, each lane's tokens leave their highest level.
__device__ __forceinline__ Best score_rows(const Choice& c, const Task& head, const bool (&lists)[2], float2 (&first)[2]) {
  const Machine& m = c.m;
  const Sampling& sampling = c.sampling();
  const Source rows = rows_of(c, head, LOGITS);
  float* scores = m.launch.choosing.scores + static_cast<u64>(c.sequence) * m.launch.logit_stride + rows.first;
  const bool noisy = is_noisy(sampling);
  Best best{NO_LEVEL, NO_TOKEN};
#pragma unroll 1
  for (u32 i = 2 * c.thread(); i < rows.count; i += CONSUMERS * 2) {
    const bool begins = i < 2 * CONSUMERS;
    const float2 pair = begins ? first[LOGITS] : make_float2(rows.at(i), rows.at(i + 1));
    const float logits[2] = {pair.x, pair.y};
    float noise[2] = {0, 0}, made[2] = {minus_infinity(), minus_infinity()};
    if (noisy) {
      noise[0] = scores[i];
      if (i + 1 < rows.count) noise[1] = scores[i + 1];
    }
    u32 levels[2] = {NO_LEVEL, NO_LEVEL};
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
      if (i + k >= rows.count) continue;
      const u32 token = rows.first + i + k;
      const float score = made[k] = score_of(m, sampling, c.sequence, token, logits[k]);
      if (lists[SCORES]) scores[i + k] = score;
      if (is_finite(logits[k])) levels[LOGITS] = max(levels[LOGITS], level_of(logits[k]));
      if (score == minus_infinity()) continue;
      if (is_finite(score)) levels[SCORES] = max(levels[SCORES], level_of(score));
      best.add_value(score + noise[k], token, FAILED_SCORES);
    }
    if (begins) first[SCORES] = make_float2(made[0], made[1]);
#pragma unroll
    for (u32 of = SCORES; of <= LOGITS; of++)
      if (lists[of] && levels[of] > NO_LEVEL) raise_cta(&c.shared.groups[of][c.lane()], levels[of]);
  }
  return best;
}

// The level that at least LISTED of the CTA's tokens reach: of the lanes' highest the one that LISTED lanes reach, since few
// more tokens do, which are spread over the lanes. It stays 0 if there are not so many. All warps, two lanes each.
__device__ __forceinline__ void find_floor(const Choice& c, u32 of) {
  const u32 group = c.shared.groups[of][c.lane()];
#pragma unroll 1
  for (u32 l = c.warp(); l < WARP; l += MK_WARPS) {
    const u32 mine = shuffle_index(group, l);
    const u32 rank = __popc(warp_ballot(group > mine || (group == mine && c.lane() < l)));
    if (rank == LISTED - 1 && c.lane() == 0) c.shared.floor = mine;
    __syncwarp();
  }
}

// Lists the CTA's first LISTED tokens in their order, and weighs all of them beside their highest, `top`. `first`: the
// thread's first pair. Begins after a meeting.
__device__ __forceinline__ void give_list(const Choice& c, const Task& head, u32 of, float2 first, float top) {
  ChoiceShared& shared = c.shared;
  const Source rows = rows_of(c, head, of);
  u64* words = c.own() + CHOICE_LISTS + of * LISTED;
  const bool weighs = has_mass(c.sampling(), of);
  find_floor(c, of);
  if (weighs) {
    u64 mass = 0;
    rows.each(first, [&](float value, u32) { mass += weight_of(value, top); });
    __syncwarp();
    mass = warp_sum_long(mass);
    if (c.lane() == 0) shared.sums[of][c.warp()] = mass;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const u32 floor = shared.floor;
  rows.each(first, [&](float value, u32 token) {
    const u32 level = level_of(value);
    if (level < floor) return;
    const u32 at = fetch_add_cta(&shared.listed[of], 1);
    if (at < CANDIDATE_ROOM) shared.candidates[at] = order_of(level, token);
  });
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  // More candidates than there is room for come of logits that are arranged against us: then all rows are compared.
  const u32 listed = shared.listed[of];
  const bool all = listed > CANDIDATE_ROOM;
  const u32 count = all ? rows.count : listed;
  const auto candidate = [&](u32 i) {
    if (i >= count) return NO_LIMIT;
    if (!all) return shared.candidates[i];
    const float value = rows.at(i);
    return value > minus_infinity() ? order_of(level_of(value), rows.first + i) : NO_LIMIT;
  };
  // A warp for each candidate: its lanes say how many come before it.
#pragma unroll 1
  for (u32 i = c.warp(); i < max(count, LISTED); i += MK_WARPS) {
    const u64 order = candidate(i);
    u32 rank = i;
    if (order != NO_LIMIT) {
      rank = 0;
#pragma unroll 1
      for (u32 j = c.lane(); j - c.lane() < count; j += WARP) rank += __popc(warp_ballot(candidate(j) < order));
    } else if (all) {
      continue;
    }
    const u64 entry = order == NO_LIMIT ? 0 : static_cast<u64>(level_at(order)) << 32 | token_at(order);
    if (rank < LISTED && c.lane() == 0)
      store_relaxed_gpu(words + rank, entry | static_cast<u64>(c.entry_tag()) << TOKEN_BITS);
    __syncwarp();
  }
  if (weighs && c.warp() == 0) {
    const u64 mass = warp_sum_long(c.lane() < MK_WARPS ? shared.sums[of][c.lane()] : 0);
    if (c.lane() == 0) c.give_pair(c.own() + CHOICE_MASS + 2 * of, static_cast<u32>(mass), static_cast<u32>(mass >> 32));
  }
}

// After the head, in place of publish_bests.
__device__ __forceinline__ void publish_scores(const Machine& m, const Task& head) {
  const bool rounds = m.launch.choosing.mode == CHOOSE_ROUNDS;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const Choice c = choice_of(m, s, false);
    ChoiceShared& shared = c.shared;
    const bool lists[2] = {rounds && c.filtered(), rounds && c.sampling().logprobs > 0};
    const Source rows = rows_of(c, head, LOGITS);
    const u32 begin = 2 * c.thread();
    // What is far away is on its way while the words are cleared.
    float2 first[2] = {{}, make_float2(rows.at(begin), rows.at(begin + 1))};
    if (rounds) {
#pragma unroll 1
      for (u32 i = c.thread(); i < 2 * WARP; i += CONSUMERS) shared.groups[i / WARP][i % WARP] = NO_LEVEL;
      if (c.thread() < 2) shared.listed[c.thread()] = 0;
      if (c.thread() == 0) shared.floor = NO_LEVEL;
      barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    }
    Best best = score_rows(c, head, lists, first);
    __syncwarp();
    best.add_warp();
    if (c.lane() == 0) shared.bests[s][c.warp()] = best;
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    if (!rounds && c.warp() > 0) continue;
    const Best logit = best_of(warp_bests(m, s));
    best = logit.level == FAILED_LEVEL ? logit : best_of(shared.bests[s]);
    if (!rounds) {
      publish_best(m, s, best);
      continue;
    }
    if (c.thread() == 0) {
      c.give_pair(c.own() + CHOICE_TOP, best.level, best.token);
      c.give_pair(c.own() + CHOICE_TOP + 2, logit.level, logit.token);
    }
    if (best.level == FAILED_LEVEL) continue;  // nobody asks
#pragma unroll 1
    for (u32 of = SCORES; of <= LOGITS; of++) {
      if (!(of == SCORES ? lists[SCORES] : lists[LOGITS])) continue;
      if (of == LOGITS && lists[SCORES]) {
        if (c.thread() == 0) shared.floor = NO_LEVEL;
        barrier_sync(CONSUMER_BARRIER, CONSUMERS);
      }
      give_list(c, head, of, of == SCORES ? first[SCORES] : first[LOGITS], value_of(of == SCORES ? best.level : logit.level));
    }
    if (lists[LOGITS] && c.thread() == CONSUMERS - 1) {
      fence_gpu();  // with the barriers, behind everybody's logits
      c.give_pair(c.own() + CHOICE_STORED, 0, 0);
    }
    if (c.warp() == 0) prefetch_embedding(m, best.token);
    if (SEQUENCES > 1) barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
}
