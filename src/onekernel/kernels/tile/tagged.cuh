// Values that travel between CTAs in 8-byte words which carry their own tag: {32 bits of value, tag}.
//
// A word is stored and loaded whole, so a reader that sees the tag has the value: no fence, no counter, no second read.
// The tag speaks for its own word only; every reader looks at every word it uses. Tags grow over a launch and start
// above 0, with which the host clears the buffer, so no stale word can match.
#pragma once

#include "tile/spin.cuh"

__device__ __forceinline__ u64 tagged(u32 value, u32 tag) { return static_cast<u64>(tag) << 32 | value; }

__device__ __forceinline__ void publish(u64* word, u32 value, u32 tag) { store_relaxed_gpu(word, tagged(value, tag)); }

// 0 if both words of a pair carry `tag`.
__device__ __forceinline__ u32 mismatch(const Pair& pair, u32 tag) {
  return (static_cast<u32>(pair.first >> 32) ^ tag) | (static_cast<u32>(pair.second >> 32) ^ tag);
}

// Waits until `count` pairs, up to COUNT, carry `tag`: words[0], words[STRIDE], ... All are on their way at once, since the
// number of round trips, not of bytes, is what a hand-over costs. One that has come is not asked for again, and a look at
// them is a few instructions: sixteen warps that look share their issue slots with the one that loads weights.
template <u32 STRIDE, u32 COUNT>
__device__ __forceinline__ bool wait_pairs(const Watch& watch, const Pair* words, u32 count, u32 tag, u32 id, Pair (&taken)[COUNT]) {
  const u64 here = static_cast<u64>(tag) << 32;
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) taken[i] = i < count ? Pair{0, 0} : Pair{here, here};
  const auto ready = [&] {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (mismatch(taken[i], tag) != 0) taken[i] = load_relaxed_gpu(words + i * STRIDE);
    u32 different = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) different |= mismatch(taken[i], tag);
    return different == 0;
  };
  const auto seen = [&] {
    u64 other = tag;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++)
      if (mismatch(taken[i], tag) != 0) other = taken[i].second >> 32 == tag ? taken[i].first >> 32 : taken[i].second >> 32;
    return other;
  };
  return spin(watch, Wait::VALUE, id, tag, ready, seen);
}

// Thread `thread` of THREADS takes its part of `pairs` pairs of words as soon as they carry `tag`, and calls keep(pair,
// value, value) for each, UNROLL of them at once. `words` begin at word `base` of the exchange. False: give up.
template <u32 THREADS, u32 UNROLL, class Keep>
__device__ __forceinline__ bool take_pairs(const Watch& watch, const Pair* words, u32 pairs, u32 tag, u32 thread,
                                           Keep keep, u32 base = 0) {
  for (u32 first = thread; first < pairs; first += THREADS * UNROLL) {
    Pair taken[UNROLL];
    const u32 count = (pairs - first + THREADS - 1) / THREADS;
    if (!wait_pairs<THREADS>(watch, words + first, count, tag, base + 2 * first, taken)) return false;
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++)
      if (i < count) keep(first + i * THREADS, static_cast<u32>(taken[i].first), static_cast<u32>(taken[i].second));
  }
  return true;
}
