// What a CTA gives with the head: its best, and for filters and log probabilities its mass and its likeliest tokens.
#pragma once

#include "phases/choose/choice.cuh"

// Scores the CTA's rows, and finds their best: of score + noise, which depends on seed, position and token id alone, if
// nothing is filtered. Also the first place of this thread's rows, by Values.
__device__ __forceinline__ Best score_rows(const Choice& c, const Task& head, u64 (&first)[2]) {
  const Machine& m = c.m;
  const Choosing& choosing = m.launch.choosing;
  const Sampling& sampling = c.sampling();
  const u64 at = static_cast<u64>(c.sequence) * m.launch.logit_stride;
  const Source rows = rows_of(c, head, LOGITS);
  const bool filtered = c.filtered(), noisy = !filtered && sampling.temperature > 0;
  Best best{NO_LEVEL, NO_TOKEN};
#pragma unroll 1
  for (u32 i = 2 * c.thread(); i < rows.count; i += CONSUMERS * 2) {
    const u32 token = rows.first + i;
    // Loaded before the noise is drawn, which takes as long. First rows are even.
    const float logits[2] = {rows.values[token], i + 1 < rows.count ? rows.values[token + 1] : minus_infinity()};
    uint4 words = make_uint4(0, 0, 0, 0);
    if (noisy) words = philox(sampling.seed, m.position(c.sequence) + 1, token / 4);
    float noise[2] = {0, 0};
    if (noisy) {
      noise[0] = gumbel(token & 2 ? words.z : words.x);
      noise[1] = gumbel(token & 2 ? words.w : words.y);
    }
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
      if (i + k >= rows.count) continue;
      const float score = score_of(m, sampling, c.sequence, token + k, logits[k]);
      if (filtered) choosing.scores[at + token + k] = score;
      if (is_finite(logits[k])) first[LOGITS] = min(first[LOGITS], order_of(level_of(logits[k]), token + k));
      if (score == minus_infinity()) continue;
      if (is_finite(score)) first[SCORES] = min(first[SCORES], order_of(level_of(score), token + k));
      best.add_value(score + noise[k], token + k, FAILED_SCORES);
    }
  }
  return best;
}

// The place that at least LISTED of the CTA's tokens reach, or there are not so many: of the lanes' first places the last
// that LISTED of them reach. One warp; few more tokens reach it, since a lane's tokens are spread over the CTA's rows.
__device__ __forceinline__ u64 place_to_list(const Choice& c) {
  const u32 lane = c.lane();
  u64 mine = NO_LIMIT;
#pragma unroll 4
  for (u32 w = 0; w < MK_WARPS; w++) mine = min(mine, c.shared.groups[w * WARP + lane]);
  u32 rank = 0;
#pragma unroll 4
  for (u32 l = 0; l < WARP; l++) {
    const u64 other = shuffle_index(mine, l);
    rank += other < mine || (other == mine && l < lane);
  }
  return shuffle_index(mine, __ffs(warp_ballot(rank == LISTED - 1)) - 1);
}

// Lists the CTA's first LISTED tokens in their order, and weighs all of them beside their highest, `top`. `first`: of this
// thread's. Begins after a meeting and ends with one.
__device__ __forceinline__ void give_list(const Choice& c, const Task& head, u32 of, u64 first, float top) {
  ChoiceShared& shared = c.shared;
  const Source rows = rows_of(c, head, of);
  u64* words = c.own() + CHOICE_LISTS + of * LISTED;
  shared.groups[c.thread()] = first;
  if (c.thread() == 0) shared.listed = 0;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (c.warp() == 0) {
    const u64 floor = place_to_list(c);
    if (c.lane() == 0) shared.floor = floor;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const u64 floor = shared.floor;
  u64 mass = 0;
  rows.each([&](float value, u32 token) {
    mass += weight_of(value, top);
    const u64 order = order_of(level_of(value), token);
    if (order > floor) return;
    const u32 at = fetch_add_cta(&shared.listed, 1);
    if (at < CANDIDATE_ROOM) shared.candidates[at] = order;
  });
  __syncwarp();
  mass = warp_sum_long(mass);
  if (c.lane() == 0) shared.sums[c.warp()] = mass;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  // More candidates than there is room for come of logits that are arranged against us: then all rows are compared.
  const u32 listed = shared.listed;
  const bool all = listed > CANDIDATE_ROOM;
  const u32 count = all ? rows.count : listed;
  const auto candidate = [&](u32 i) {
    if (!all) return shared.candidates[i];
    const float value = rows.values[rows.first + i];
    return value > minus_infinity() ? order_of(level_of(value), rows.first + i) : NO_LIMIT;
  };
#pragma unroll 1
  for (u32 i = c.thread(); i < max(count, LISTED); i += CONSUMERS) {
    u32 rank = i;
    u64 entry = 0;  // no level
    if (i < count) {
      const u64 order = candidate(i);
      entry = static_cast<u64>(level_at(order)) << 32 | token_at(order);
      rank = 0;
#pragma unroll 4
      for (u32 j = 0; j < count; j++) rank += candidate(j) < order;
    }
    if (rank < LISTED) store_relaxed_gpu(words + rank, entry | static_cast<u64>(c.entry_tag()) << TOKEN_BITS);
  }
  if (c.warp() == 0) {
    mass = warp_sum_long(c.lane() < MK_WARPS ? shared.sums[c.lane()] : 0);
    if (c.lane() == 0) c.give_pair(c.own() + CHOICE_MASS + 2 * of, static_cast<u32>(mass), static_cast<u32>(mass >> 32));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
}

// After the head, in place of publish_bests.
__device__ __forceinline__ void publish_scores(const Machine& m, const Task& head) {
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const Choice c = choice_of(m, s, false);
    ChoiceShared& shared = c.shared;
    u64 first[2] = {NO_LIMIT, NO_LIMIT};
    Best best = score_rows(c, head, first);
    __syncwarp();
    best.add_warp();
    if (c.lane() == 0) shared.bests[c.sequence][c.warp()] = best;
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    const bool rounds = m.launch.choosing.mode == CHOOSE_ROUNDS;
    if (!rounds && c.warp() > 0) continue;
    const Best logit = best_of(warp_bests(m, c.sequence));
    best = logit.level == FAILED_LEVEL ? logit : best_of(shared.bests[c.sequence]);
    if (!rounds) {
      publish_best(m, c.sequence, best);
      continue;
    }
    if (c.thread() == 0) {
      if (c.sampling().logprobs > 0) fence_gpu();  // the choosing CTA reads the logit of its token where the owner stored it
      c.give_pair(c.own() + CHOICE_TOP, best.level, best.token);
      c.give_pair(c.own() + CHOICE_TOP + 2, logit.level, logit.token);
    }
    if (best.level == FAILED_LEVEL) continue;  // nobody asks
#pragma unroll 1
    for (u32 of = SCORES; of <= LOGITS; of++) {
      if (of == SCORES ? !c.filtered() : c.sampling().logprobs == 0) continue;
      give_list(c, head, of, of == SCORES ? first[SCORES] : first[LOGITS], value_of(of == SCORES ? best.level : logit.level));
    }
    if (c.warp() == 0) prefetch_embedding(m, best.token);
  }
}
