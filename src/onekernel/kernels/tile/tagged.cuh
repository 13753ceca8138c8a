// Values that travel between CTAs in 8-byte words which carry their own tag: {32 bits of value, tag}.
//
// A word is stored and loaded whole, so a reader that sees the tag has the value: no fence, no counter, no second read.
// The tag speaks for its own word only; every reader looks at every word it uses. Tags grow over a launch and start
// above 0, with which the host clears the buffer, so no stale word can match.
#pragma once

#include "tile/spin.cuh"

__device__ __forceinline__ u64 tagged(u32 value, u32 tag) { return static_cast<u64>(tag) << 32 | value; }

__device__ __forceinline__ void publish(u64* word, u32 value, u32 tag) { store_relaxed_gpu(word, tagged(value, tag)); }

// Thread `thread` of THREADS takes its part of `pairs` pairs of words as soon as they carry `tag`, and calls keep(pair,
// value, value) for each. UNROLL pairs per thread are loaded at once: the number of round trips, not of bytes, is what
// a hand-over costs. `words` begin at word `base` of the exchange. False: give up.
template <u32 THREADS, u32 UNROLL, class Keep>
__device__ __forceinline__ bool take_pairs(const Watch& watch, const Pair* words, u32 pairs, u32 tag, u32 thread,
                                           Keep keep, u32 base = 0) {
  for (u32 first = thread; first < pairs; first += THREADS * UNROLL) {
    Pair taken[UNROLL];
    const bool ok = spin(watch, Wait::VALUE, base + 2 * first, tag, [&](u64& seen) {
      bool ready = true;
#pragma unroll
      for (u32 i = 0; i < UNROLL; i++)
        if (first + i * THREADS < pairs) taken[i] = load_relaxed_gpu(words + first + i * THREADS);
#pragma unroll
      for (u32 i = 0; i < UNROLL; i++) {
        if (first + i * THREADS >= pairs) continue;
        const u64 tags[2] = {taken[i].first >> 32, taken[i].second >> 32};
        for (u64 t : tags) {
          if (t == tag) continue;
          ready = false;
          seen = t;
        }
      }
      return ready;
    });
    if (!ok) return false;
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++)
      if (first + i * THREADS < pairs)
        keep(first + i * THREADS, static_cast<u32>(taken[i].first), static_cast<u32>(taken[i].second));
  }
  return true;
}
