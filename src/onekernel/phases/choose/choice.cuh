// How CTAs agree on a token when a filter or log probabilities need more than the best one: words of their own, in rounds.
// In each round some words are published once, with the round's tag, and taken; all CTAs count rounds alike. The words of
// a round are used again only in a later one, which begins when the choosing CTA, having taken everybody's, has published
// a verdict or the token.
#pragma once

#include "phases/choose/score.cuh"
#include "phases/head/kernel.cuh"
#include "ptx/atomic.cuh"
#include "ptx/fence.cuh"
#include "ptx/opaque.cuh"

// What one sequence's words hold: of all CTAs first, then a block for each. onekernel/plan/abi.py has the sizes.
enum ChoiceWord : u32 {
  CHOICE_SUMS = 0,                 // (RADIX, 2): counts and masses, not tagged: sums of whole numbers
  CHOICE_VERDICT = 2 * RADIX,      // what the choosing CTA found
};
enum ChoiceCtaWord : u32 {
  CHOICE_TOP = 0,                        // the highest score and its token, the highest logit
  CHOICE_LISTS = 4,                      // of scores, of logits: bound, mass, then LISTED pairs of value and token
  CHOICE_LIST_WORDS = 4 + 2 * LISTED,
  CHOICE_BEST = CHOICE_LISTS + 2 * CHOICE_LIST_WORDS,  // the best draw and its token
  CHOICE_ARRIVED = CHOICE_BEST + 2,     // nothing but that they have come
};
static_assert(CHOICE_VERDICT < CHOICE_FIXED_WORDS && CHOICE_ARRIVED < CHOICE_CTA_WORDS && CHOICE_CTA_WORDS % 2 == 0, "");

// The search for a cut. The choosing CTA alone has counts and masses.
struct Search {
  u64 want;    // count or mass still to be reached, at least 1
  u64 mass;    // of all tokens before the present prefix; at the end of what is kept
  u64 cut[2];  // by Values: places up to which tokens are kept or reported
  u32 digit, found, last;  // of the latest look: `last`: no deeper one is needed
};

// Shared memory of the choice, where products keep their partial sums; CHOICE_SHARED_BYTES at most.
struct ChoiceShared {
  uint4 tallies[RADIX];  // count, and the mass in three parts of 14 bits, whose sums do not overflow
  Search search;
  u64 total;  // mass of what was tallied last
  u64 masses[2];  // of scores and of logits, all CTAs together
  u32 bounds[2];  // of their lists: bins from here on are not listed by all
  u32 listed, verdict;
  u32 members[LISTED][2];  // logit and token
  Best bests[SEQUENCES][MK_WARPS];
  u32 logits[MK_WARPS];
  float tops[2];  // the highest score and the highest logit
  u32 outcomes[SEQUENCES];
};
static_assert(sizeof(ChoiceShared) <= CHOICE_SHARED_BYTES, "onekernel/plan/shared.py keeps this much");

__device__ __forceinline__ ChoiceShared& choice_shared(const Machine& m) {
  return *Shared::at<ChoiceShared>(forget(m.shared.partial_at()));
}

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
  __device__ __forceinline__ u64* words() const {
    return m.launch.choosing.words + sequence * (CHOICE_FIXED_WORDS + m.header.ctas * CHOICE_CTA_WORDS);
  }
  __device__ __forceinline__ u64* block(u32 cta) const { return words() + CHOICE_FIXED_WORDS + cta * CHOICE_CTA_WORDS; }
  __device__ __forceinline__ u64* own() const { return block(forget(blockIdx.x)); }
  __device__ __forceinline__ u32 tag() const { return token() * CHOICE_ROUNDS + round + 1; }
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

// How far below the top a score lies: bins of 1/8, the last one without an end.
constexpr u32 BINS_PER_UNIT = 8;
__device__ __forceinline__ u32 bin_of(float score, float top) {
  const float bins = (top - score) * BINS_PER_UNIT;
  return bins < static_cast<float>(RADIX - 1) ? static_cast<u32>(bins) : RADIX - 1;
}

// A token's place in the order of choice: the higher score, of equal ones the lower id. Ascending, PLACE_BITS bits.
constexpr u32 TOKEN_BITS = 24, PLACE_BITS = 32 + TOKEN_BITS, RADIX_BITS = 8;
constexpr u64 NO_LIMIT = ~0ull;
static_assert(RADIX == 1 << RADIX_BITS && PLACE_BITS % RADIX_BITS == 0, "whole digits");
__device__ __forceinline__ u64 place_of(float score, u32 token, float top) {
  return static_cast<u64>(level_of(top) - level_of(score)) << TOKEN_BITS | token;
}

enum Values : u32 { SCORES, LOGITS };

// Tokens with their values, to go through by all consumers: the CTA's own rows, or what all CTAs have listed, as far as
// all of them have listed everything.
struct Source {
  const u64* listed;    // the first CTA's pairs, or null: rows
  const float* values;  // rows: (vocab) of the sequence
  u32 first, count;     // rows: the CTA's; listed: 0 and LISTED * CTAs
  u32 bound;
  float top;

  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll 1
    for (u32 i = forget(threadIdx.x); i < count; i += CONSUMERS) {
      u32 token = first + i;
      float value;
      if (listed == nullptr) {
        value = values[token];
      } else {
        const u64* at = listed + i / LISTED * CHOICE_CTA_WORDS + i % LISTED * 2;
        const Pair pair = load_relaxed_gpu(reinterpret_cast<const Pair*>(at));
        value = __uint_as_float(static_cast<u32>(pair.first));
        token = static_cast<u32>(pair.second);
      }
      if (value > minus_infinity() && bin_of(value, top) < bound) visit(value, token);
    }
  }
};

// The head's rows are those of the task before.
__device__ __forceinline__ Source rows_of(const Choice& c, u32 of) {
  const Task& head = c.m.shared.tasks()[c.m.phase - 1];
  const u32 tile_rows = head.flags & FLAG_ROWS_4 ? 4 : 8, end = c.m.header.vocab_limit;
  const u32 first = min(head.first * tile_rows, end), count = min(head.count * tile_rows, end - first);
  const float* values = of == SCORES ? c.m.launch.choosing.scores : c.m.launch.logits;
  return {nullptr, values + static_cast<u64>(c.sequence) * c.m.launch.logit_stride, first, count, RADIX, c.shared.tops[of]};
}

__device__ __forceinline__ Source lists_of(const Choice& c, u32 of) {
  const u64* listed = c.block(0) + CHOICE_LISTS + of * CHOICE_LIST_WORDS + 4;
  return {listed, nullptr, 0, c.m.header.ctas * LISTED, c.shared.bounds[of], c.shared.tops[of]};
}
