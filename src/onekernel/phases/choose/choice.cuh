// How CTAs agree on a token when a filter or log probabilities need more than the best one: words of their own.
//
// With the head each CTA gives its best, its mass and a list of its likeliest tokens, and the choosing CTA chooses among
// those. If they cannot decide, it calls the others, who wait for the token or a call, and all look together, in rounds. A
// round's words are published once, with the round's tag, and used again only in a later one, which begins when the choosing
// CTA, having taken everybody's, has published a verdict or the token.
#pragma once

#include "phases/choose/score.cuh"
#include "phases/head/kernel.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/opaque.cuh"

// What one sequence's words hold: of all CTAs first, then a block for each. onekernel/plan/abi.py has the sizes.
enum ChoiceWord : u32 {
  CHOICE_SUMS = 0,                   // (RADIX, 2): counts and masses, not tagged: sums of whole numbers
  CHOICE_VERDICT = 2 * RADIX,        // what the choosing CTA found
  CHOICE_CALL = CHOICE_VERDICT + 2,  // of sequence 0, for all: that all are to look, and the highest score
};
enum ChoiceCtaWord : u32 {
  CHOICE_TOP = 0,      // by Values: the highest level, and the best token
  CHOICE_MASS = 4,     // by Values: beside the CTA's own highest, low and high half
  CHOICE_LISTS = 8,    // by Values: LISTED entries in their order
  CHOICE_BEST = CHOICE_LISTS + 2 * LISTED,  // the best draw and its token
  CHOICE_ARRIVED = CHOICE_BEST + 2,         // nothing but that they have come
  CHOICE_STORED = CHOICE_ARRIVED + 2,       // nothing but that its logits are where the choosing CTA can read them
};
static_assert(CHOICE_CALL + 2 <= CHOICE_FIXED_WORDS && CHOICE_STORED + 2 <= CHOICE_CTA_WORDS && CHOICE_CTA_WORDS % 2 == 0, "");
static_assert(LISTED % 2 == 0, "entries are taken in pairs");

enum Values : u32 { SCORES, LOGITS };

// A token's place in the order of choice: the higher level, of equal ones the lower id. Ascending, ORDER_BITS bits.
constexpr u32 TOKEN_BITS = 24, ORDER_BITS = 32 + TOKEN_BITS, RADIX_BITS = 8;
constexpr u64 NO_LIMIT = ~0ull;
static_assert(RADIX == 1 << RADIX_BITS && ORDER_BITS % RADIX_BITS == 0, "whole digits");
__device__ __forceinline__ u64 order_of(u32 level, u32 token) { return static_cast<u64>(~level) << TOKEN_BITS | token; }
__device__ __forceinline__ u32 level_at(u64 order) { return ~static_cast<u32>(order >> TOKEN_BITS); }
__device__ __forceinline__ u32 token_at(u64 order) { return static_cast<u32>(order) % (1u << TOKEN_BITS); }

struct Member {
  u64 order, weight;
};

// The search for a cut. The choosing CTA alone has counts and masses.
struct Search {
  u64 want;                // count or mass still to be reached, at least 1
  u64 mass;                // of all tokens before the present bin or prefix
  u64 cut;                 // the place up to which tokens are kept
  u32 digit, found, last;  // of the latest look: `last`: no deeper one is needed
};

// Shared memory of the choice, where products keep inputs and partial sums; CHOICE_SHARED_BYTES at most.
constexpr u32 MEMBER_ROOM = 512, EDGE_ROOM = 256, CANDIDATE_ROOM = 256, CTA_ROOM = 256, PIVOTS = 16;
struct ChoiceShared {
  union {
    Member members[MEMBER_ROOM];  // what may be kept, of all that is listed
    u64 candidates[CANDIDATE_ROOM];  // places of the CTA's tokens that may be listed
  };
  union {
    uint4 tallies[RADIX];    // count, and the mass in three parts of 14 bits, whose sums do not overflow
    u64 firsts[2][CTA_ROOM];  // by Values: of each CTA the first place
    Member edge[EDGE_ROOM];  // the members among which a cut lies
    u32 groups[2][WARP];     // by Values: the highest level of each lane's tokens
  };
  Search search;
  u64 sums[2][MK_WARPS], floors[MK_WARPS];  // of each warp: masses by Values, and the first place
  Member pivots[PIVOTS];                    // a place, and the count or mass of what comes up to it
  u64 thresholds[2];                        // by Values: the place up to which tokens become members
  u32 listed[2], floor, edges, verdict;
  Best bests[SEQUENCES][MK_WARPS];
  u32 levels[MK_WARPS];
  float tops[2];  // by Values: the highest
  u32 outcomes[SEQUENCES];
};
static_assert(sizeof(ChoiceShared) <= CHOICE_SHARED_BYTES, "onekernel/plan/shared.py keeps this much");

__device__ __forceinline__ ChoiceShared& choice_shared(const Machine& m) {
  return *Shared::at<ChoiceShared>(forget(m.shared.choice_at()));
}

// Over all lanes: the sum of numbers below 2**54, and the lowest and the highest of any.
__device__ __forceinline__ u64 warp_sum_long(u64 value) {
  constexpr u32 HALF = 27;
  const u32 low = warp_sum(static_cast<u32>(value) % (1u << HALF)), high = warp_sum(static_cast<u32>(value >> HALF));
  return (static_cast<u64>(high) << HALF) + low;
}
__device__ __forceinline__ u64 warp_min_long(u64 value) {
  const u32 high = warp_min(static_cast<u32>(value >> 32));
  const u32 low = warp_min(value >> 32 == high ? static_cast<u32>(value) : ~0u);
  return static_cast<u64>(high) << 32 | low;
}
__device__ __forceinline__ u64 warp_max_long(u64 value) { return ~warp_min_long(~value); }

// One sequence's choice, as its CTA sees it.
struct Choice {
  const Machine& m;
  ChoiceShared& shared;
  u32 sequence, round;
  bool chooses;  // this CTA decides

  // Forgotten, or the loop over tokens would keep what follows from them in registers that it has not got.
  __device__ __forceinline__ u32 token() const { return forget(m.token); }
  __device__ __forceinline__ u32 thread() const { return forget(threadIdx.x); }
  __device__ __forceinline__ u32 lane() const { return thread() % WARP; }
  __device__ __forceinline__ u32 warp() const { return thread() / WARP; }
  __device__ __forceinline__ const Sampling& sampling() const { return m.launch.choosing.sampling[sequence]; }
  __device__ __forceinline__ bool filtered() const { return sampling().flags & CHOOSE_FILTERED; }
  __device__ __forceinline__ u64* words() const {
    return m.launch.choosing.words + sequence * (CHOICE_FIXED_WORDS + m.header.ctas * CHOICE_CTA_WORDS);
  }
  __device__ __forceinline__ u64* block(u32 cta) const { return words() + CHOICE_FIXED_WORDS + cta * CHOICE_CTA_WORDS; }
  __device__ __forceinline__ u64* own() const { return block(forget(blockIdx.x)); }
  __device__ __forceinline__ u32 tag() const { return token() * CHOICE_ROUNDS + round + 1; }
  // Of an entry, whose word is {level, tag, token}: it is written for every token, so few bits do.
  __device__ __forceinline__ u32 entry_tag() const { return token() % 255 + 1; }
  __device__ __forceinline__ void give_pair(u64* word, u32 first, u32 second) const {
    publish(word, first, tag());
    publish(word + 1, second, tag());
  }
  __device__ __forceinline__ bool take_pair(const u64* word, u32& first, u32& second) const {
    const u32 want = tag();
    Pair got{};
    const bool ok = spin(m.watch, Wait::CHOICE, static_cast<u32>(word - m.launch.choosing.words), want, [&](u64& seen) {
      got = load_relaxed_gpu(reinterpret_cast<const Pair*>(word));
      seen = got.first >> 32 == want ? got.second >> 32 : got.first >> 32;
      return seen == want;
    });
    first = static_cast<u32>(got.first);
    second = static_cast<u32>(got.second);
    return ok;
  }
};

__device__ __forceinline__ Choice choice_of(const Machine& m, u32 sequence, bool chooses) {
  return {m, choice_shared(m), SEQUENCES == 1 ? 0 : forget(sequence), 0, chooses};
}

// The CTA's rows with their values, to go through by all consumers.
struct Source {
  const float* values;  // (vocab) of the sequence
  u32 first, count;

  // -inf if there is none.
  __device__ __forceinline__ float at(u32 row) const { return row < count ? values[first + row] : minus_infinity(); }

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 1
    for (u32 i = forget(threadIdx.x); i < count; i += CONSUMERS)
      if (values[first + i] > minus_infinity()) visit(values[first + i], first + i);
  }

  // By pairs, of which the thread's first is at hand.
  template <class Visit>
  __device__ __forceinline__ void each(float2 pair, Visit visit) const {
#pragma unroll 1
    for (u32 i = 2 * forget(threadIdx.x); i < count; i += 2 * CONSUMERS) {
      if (i >= 2 * CONSUMERS) pair = make_float2(at(i), at(i + 1));
      if (pair.x > minus_infinity()) visit(pair.x, first + i);
      if (pair.y > minus_infinity()) visit(pair.y, first + i + 1);
    }
  }
};

__device__ __forceinline__ Source rows_of(const Choice& c, const Task& head, u32 of) {
  const u32 tile_rows = HEAD_INT8 ? QUANTISED_ROWS : head.flags & FLAG_ROWS_4 ? 4 : 8, end = c.m.header.vocab_limit;
  const u32 first = min(head.first * tile_rows, end), count = min(head.count * tile_rows, end - first);
  const float* values = of == SCORES ? c.m.launch.choosing.scores : c.m.launch.logits;
  return {values + static_cast<u64>(c.sequence) * c.m.launch.logit_stride, first, count};
}
