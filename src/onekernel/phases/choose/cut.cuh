// Where a filter cuts: the place of the k-th token, or of the one with which the mass reaches p. Found digit by digit of
// the places, in exact whole numbers, so that the result depends on no order and no partition.
#pragma once

#include "phases/choose/choice.cuh"

constexpr u32 BY_BIN = 0xFFFFFFFFu;  // instead of a shift

// Counts and weighs, in shared memory, the tokens up to the cut whose digits above `shift` are `prefix`: by their next
// digit, or all by their bin. Ends with a meeting.
__device__ __forceinline__ void tally(const Choice& c, u32 of, const Source& source, u64 prefix, u32 shift) {
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) c.shared.tallies[i] = make_uint4(0, 0, 0, 0);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  source.each([&](float value, u32 token) {
    u32 digit = bin_of(value, source.top);
    if (shift != BY_BIN) {
      const u64 place = place_of(value, token, source.top);
      if (place > c.shared.search.cut[of] || place >> shift >> RADIX_BITS != prefix) return;
      digit = static_cast<u32>(place >> shift) % RADIX;
    }
    const u64 weight = weight_of(value, source.top);
    uint4* to = c.shared.tallies + digit;
    fetch_add_cta(&to->x, 1);
    if (weight == 0) return;
    fetch_add_cta(&to->y, static_cast<u32>(weight & 0x3fff));
    fetch_add_cta(&to->z, static_cast<u32>(weight >> 14 & 0x3fff));
    fetch_add_cta(&to->w, static_cast<u32>(weight >> 28));
  });
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
}

__device__ __forceinline__ u64 mass_of(const uint4& tally) {
  return tally.y + (static_cast<u64>(tally.z) << 14) + (static_cast<u64>(tally.w) << 28);
}

// One warp: the bin in which the sum of counts, or of masses, reaches what is wanted.
__device__ __forceinline__ void find_crossing(const Choice& c, bool by_mass, u32 shift) {
  constexpr u32 BINS = RADIX / WARP;
  ChoiceShared& shared = c.shared;
  Search& search = shared.search;
  const uint4* tallies = shared.tallies + c.lane() * BINS;
  u64 count = 0, mass = 0;
#pragma unroll 1
  for (u32 i = 0; i < BINS; i++) {
    count += tallies[i].x;
    mass += mass_of(tallies[i]);
  }
  // Sums over all lanes before and this one.
  u64 measure = by_mass ? mass : count;
  const u64 want = search.want;
  __syncwarp();
#pragma unroll 1
  for (u32 distance = 1; distance < WARP; distance *= 2) {
    const u64 mass_before = shuffle_index(mass, c.lane() - distance), before = shuffle_index(measure, c.lane() - distance);
    if (c.lane() >= distance) mass += mass_before, measure += before;
    __syncwarp();
  }
  if (c.lane() == WARP - 1) {
    shared.total = mass;
    search.digit = search.last = 0;
    search.found = measure >= want;
    if (measure < want) search.mass += mass;
  }
  __syncwarp();
  // From the last of the lane's bins back to the one that crosses: `measure` and `mass` are those before it.
  if (measure < want) return;
#pragma unroll 1
  for (u32 i = BINS; i-- > 0;) {
    const u64 step = by_mass ? mass_of(tallies[i]) : tallies[i].x;
    measure -= step;
    mass -= mass_of(tallies[i]);
    if (measure >= want) continue;
    // Only the lane whose bin it is comes here. All of that are wanted, or it has but one: no deeper look is needed.
    const bool last = shift == 0 || tallies[i].x == 1 || (!by_mass && measure + step == want);
    search.digit = c.lane() * BINS + i;
    search.last = last;
    search.mass += mass + (last ? mass_of(tallies[i]) : 0);
    search.want = want - measure;
    return;
  }
}

// Every CTA adds its tallies to the sums of all; the choosing one gets them in the place of its own, and clears them: who
// adds next has taken a verdict that was published after that. False: give up.
__device__ __forceinline__ bool add_up(const Choice& c) {
  u64* sums = c.words() + CHOICE_SUMS;
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) {
    const uint4 own = c.shared.tallies[i];
    if (own.x == 0) continue;
    add_relaxed_gpu(sums + 2 * i, static_cast<u64>(own.x));
    add_relaxed_gpu(sums + 2 * i + 1, mass_of(own));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (c.thread() == 0) {
    fence_gpu();  // with the barrier, behind everybody's additions
    c.give_pair(c.own() + CHOICE_ARRIVED, 0, 0);
  }
  if (!c.chooses) return true;
  bool ok = true;
#pragma unroll 1
  for (u32 cta = c.thread(); ok && cta < c.m.header.ctas; cta += CONSUMERS) {
    u32 nothing;
    ok = c.take_pair(c.block(cta) + CHOICE_ARRIVED, nothing, nothing);
  }
  fence_gpu();
  if (!c.m.meet(ok)) return false;
#pragma unroll 1
  for (u32 i = c.thread(); i < RADIX; i += CONSUMERS) {
    const u64 count = load_relaxed_gpu(sums + 2 * i), mass = load_relaxed_gpu(sums + 2 * i + 1);
    store_relaxed_gpu(sums + 2 * i, 0ull);
    store_relaxed_gpu(sums + 2 * i + 1, 0ull);
    c.shared.tallies[i] = make_uint4(static_cast<u32>(count), static_cast<u32>(mass & 0x3fff),
                                     static_cast<u32>(mass >> 14 & 0x3fff), static_cast<u32>(mass >> 28));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

// All threads get `verdict` of the choosing CTA's thread 0; `spread`: those of all CTAs. Ends with a meeting. False: give
// up.
__device__ __forceinline__ bool share_verdict(Choice& c, bool spread, u32& verdict) {
  bool ok = true;
  if (c.thread() == 0) {
    if (spread && c.chooses) {
      fence_gpu();
      c.give_pair(c.words() + forget(CHOICE_VERDICT), verdict, 0);
    } else if (spread) {
      u32 nothing;
      ok = c.take_pair(c.words() + forget(CHOICE_VERDICT), verdict, nothing);
      fence_gpu();
    }
    c.shared.verdict = verdict;
  }
  if (!c.m.meet(ok)) return false;
  verdict = c.shared.verdict;
  c.round += spread;
  return true;
}

// Looks among the tokens up to the present cut for search.want of them, or of mass, and leaves the new cut and its mass in
// shared memory. Not found: there is less, and all are kept. `spread`: all CTAs take part with their rows; otherwise the
// choosing one alone, with what was listed. Begins and ends with a meeting. False: give up.
__device__ __forceinline__ bool find_cut(Choice& c, u32 of, const Source& source, bool by_mass, bool spread) {
  Search& search = c.shared.search;
  u64 prefix = 0;
  u32 shift = PLACE_BITS, verdict = 0;
#pragma unroll 1
  do {
    shift -= RADIX_BITS;
    tally(c, of, source, prefix, shift);
    if (spread) {
      if (!add_up(c)) return false;
      c.round++;
    }
    if (c.chooses && c.warp() == 0) find_crossing(c, by_mass, shift);
    __syncwarp();
    if (c.thread() == 0) verdict = search.digit | search.last << 8 | search.found << 9;
    if (!share_verdict(c, spread, verdict)) return false;
    prefix = prefix << RADIX_BITS | verdict % RADIX;
  } while (verdict >> 8 == 2);
  if (c.thread() == 0) {
    search.found = verdict >> 9;
    if (search.found) search.cut[of] = ((prefix + 1) << shift) - 1;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}
