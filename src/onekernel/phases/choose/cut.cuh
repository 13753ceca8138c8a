// Tallies, and the bin in which a filter cuts: exact whole numbers, so that the result depends on no order and no partition.
#pragma once

#include "phases/choose/choice.cuh"

__device__ __forceinline__ void clear_tallies(const Choice& c) {
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) c.shared.tallies[i] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void add_tally(const Choice& c, u32 bin, u64 weight) {
  uint4* to = c.shared.tallies + bin;
  fetch_add_cta(&to->x, 1);
  if (weight == 0) return;
  fetch_add_cta(&to->y, static_cast<u32>(weight & 0x3fff));
  fetch_add_cta(&to->z, static_cast<u32>(weight >> 14 & 0x3fff));
  fetch_add_cta(&to->w, static_cast<u32>(weight >> 28));
}

__device__ __forceinline__ u64 mass_of(const uint4& tally) {
  return tally.y + (static_cast<u64>(tally.z) << 14) + (static_cast<u64>(tally.w) << 28);
}

// One warp: the bin in which the sum of counts, or of masses, reaches want_of(mass of all bins), of which search.want
// keeps what is left; and the mass before that bin, or of all if it is not reached.
template <class WantOf>
__device__ __forceinline__ void find_crossing(const Choice& c, bool by_mass, WantOf want_of) {
  constexpr u32 BINS = RADIX / WARP;
  Search& search = c.shared.search;
  const uint4* tallies = c.shared.tallies + c.lane() * BINS;
  u64 count = 0, mass = 0;
#pragma unroll 4
  for (u32 i = 0; i < BINS; i++) {
    const uint4 tally = tallies[i];
    count += tally.x;
    mass += mass_of(tally);
  }
  // Sums over all lanes before and this one.
  u64 measure = by_mass ? mass : count;
#pragma unroll 1
  for (u32 distance = 1; distance < WARP; distance *= 2) {
    const u64 mass_before = shuffle_index(mass, c.lane() - distance), before = shuffle_index(measure, c.lane() - distance);
    if (c.lane() >= distance) mass += mass_before, measure += before;
    __syncwarp();
  }
  const u64 want = want_of(shuffle_index(mass, WARP - 1));
  const u32 crossed = warp_ballot(measure >= want);
  if (crossed == 0 && c.lane() == WARP - 1) {
    search.found = search.last = 0;
    search.mass += mass;
  }
  // Back from the last bin of the lane in which it is reached: `measure` and `mass` are those before.
  if (crossed == 0 || c.lane() != static_cast<u32>(__ffs(crossed)) - 1) return;
#pragma unroll 1
  for (u32 i = BINS; i-- > 0;) {
    const uint4 tally = tallies[i];
    const u64 step = by_mass ? mass_of(tally) : tally.x;
    measure -= step;
    mass -= mass_of(tally);
    if (measure >= want) continue;
    search.digit = c.lane() * BINS + i;
    search.found = 1;
    search.last = tally.x == 1 || (!by_mass && measure + step == want);  // all of the bin, or one token
    search.mass += mass;
    search.want = want - measure;
    return;
  }
}
