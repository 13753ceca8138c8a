// The tokens that may be kept, of all that CTAs have listed: the choosing CTA's members, and where the cut lies among them.
#pragma once

#include "phases/choose/lists.cuh"
#include "phases/choose/together.cuh"

// The mass of all tokens is at most its 2**17th part from the sum of the CTAs' masses, each scaled from the CTA's own
// highest value to the highest of all: that is two exponentials of 3e-7 each, two differences of at most 28 (what is
// further below weighs less than one unit) rounded to 2**-24 of their size, and a unit for each of up to 2**20 tokens.
constexpr u32 MASS_BITS = 17;

// The CTAs' lists of one kind of values, of which a thread takes LIST_PAIRS pairs of entries at once.
constexpr u32 LIST_PAIRS = 3, CTA_PAIRS = LISTED / 2;
struct Lists {
  const Choice& c;
  u32 of;

  __device__ __forceinline__ u32 pairs() const { return c.m.header.ctas * CTA_PAIRS; }
  __device__ __forceinline__ const Pair* at(u32 pair) const {
    return reinterpret_cast<const Pair*>(c.block(pair / CTA_PAIRS) + CHOICE_LISTS + of * LISTED) + pair % CTA_PAIRS;
  }

  // The thread's pairs from pair `first` on, as they are now.
  __device__ __forceinline__ void ask(u32 first, Pair (&got)[LIST_PAIRS]) const {
#pragma unroll
    for (u32 n = 0; n < LIST_PAIRS; n++) {
      const u32 pair = first + n * CONSUMERS;
      got[n] = pair < pairs() ? load_relaxed_gpu(at(pair)) : Pair{0, 0};
    }
  }

  // Asks again for those that have not come. False: give up.
  __device__ __forceinline__ bool wait(u32 first, Pair (&got)[LIST_PAIRS]) const {
    const u32 tag = c.entry_tag();
    const auto entry_tag = [](u64 entry) { return static_cast<u32>(entry) >> TOKEN_BITS; };
    return spin(c.m.watch, Wait::CHOICE, static_cast<u32>(c.block(0) - c.m.launch.choosing.words) + first, tag, [&](u64& seen) {
      bool ready = true;
#pragma unroll
      for (u32 n = 0; n < LIST_PAIRS; n++) {
        const u32 pair = first + n * CONSUMERS, low = entry_tag(got[n].first), high = entry_tag(got[n].second);
        if (pair >= pairs() || (low == tag && high == tag)) continue;
        ready = false;
        seen = low == tag ? high : low;
        got[n] = load_relaxed_gpu(at(pair));
      }
      return ready;
    });
  }
};

// The place of the first token of the CTA that comes `rank`th of all: so many tokens at least come up to it. All threads.
__device__ __forceinline__ void find_threshold(const Choice& c, u32 of, u32 rank) {
  const u32 ctas = c.m.header.ctas, part = c.thread() % 2;
  const u64* firsts = c.shared.firsts[of];
  if (rank >= ctas || ctas * LISTED <= MEMBER_ROOM) return;  // all that is listed
#pragma unroll 1
  for (u32 i = c.thread() / 2; i - c.lane() / 2 < ctas; i += CONSUMERS / 2) {
    const u64 mine = i < ctas ? firsts[i] : NO_LIMIT;
    u32 before = 0;
#pragma unroll 4
    for (u32 j = part; j < ctas; j += 2) before += firsts[j] < mine;
    before += shuffle_xor(before, 1);
    if (i < ctas && before == rank - 1 && level_at(mine) != NO_LEVEL) c.shared.thresholds[of] = mine;
    __syncwarp();
  }
}

// Collects what is listed up to a threshold and not further than `least` below the top, and notes what is listed last. False:
// give up.
__device__ __forceinline__ bool collect(const Choice& c, u32 of, float least) {
  ChoiceShared& shared = c.shared;
  const Lists lists{c, of};
  const u64 threshold = shared.thresholds[of];
  const float top = shared.tops[of];
  u64 floor = NO_LIMIT;
  bool ok = true;
#pragma unroll 1
  for (u32 first = c.thread(); ok && first - c.lane() < lists.pairs(); first += CONSUMERS * LIST_PAIRS) {
    Pair got[LIST_PAIRS];
    lists.ask(first, got);
    const bool came = lists.wait(first, got);
    __syncwarp();
    ok = warp_ballot(!came) == 0;
    if (!ok) break;
    u32 votes[2 * LIST_PAIRS], all = 0;
#pragma unroll
    for (u32 n = 0; n < 2 * LIST_PAIRS; n++) {
      const u64 entry = n % 2 == 0 ? got[n / 2].first : got[n / 2].second;
      const u32 level = static_cast<u32>(entry >> 32);
      const u64 order = order_of(level, static_cast<u32>(entry) % (1u << TOKEN_BITS));
      const bool is = level != NO_LEVEL;
      if (n % 2 == 1 && is && (first + n / 2 * CONSUMERS) % CTA_PAIRS == CTA_PAIRS - 1) floor = min(floor, order);
      votes[n] = warp_ballot(is && order <= threshold && !(value_of(level) - top < least));
      all += __popc(votes[n]);
    }
    if (all == 0) continue;
    u32 next = 0;
    if (c.lane() == 0) next = fetch_add_cta(&shared.listed[of], all);
    next = shuffle_index(next, 0);
#pragma unroll
    for (u32 n = 0; n < 2 * LIST_PAIRS; n++) {
      const u64 entry = n % 2 == 0 ? got[n / 2].first : got[n / 2].second;
      const u32 at = next + __popc(votes[n] & ((1u << c.lane()) - 1));
      if (votes[n] >> c.lane() & 1 && at < MEMBER_ROOM)
        shared.members[at].order = order_of(static_cast<u32>(entry >> 32), static_cast<u32>(entry) % (1u << TOKEN_BITS));
      next += __popc(votes[n]);
    }
  }
  __syncwarp();
  floor = warp_min_long(floor);
  if (c.lane() == 0) shared.floors[c.warp()] = floor;
  return ok;
}

// One warp: count or mass of the members up to a place; in all lanes.
__device__ __forceinline__ u64 measure_up_to(const Choice& c, const Member* members, u32 count, bool by_mass, u64 place) {
  u64 sum = 0;
#pragma unroll 4
  for (u32 i = c.lane(); i < count; i += WARP)
    if (members[i].order <= place) sum += by_mass ? members[i].weight : 1;
  __syncwarp();
  return warp_sum_long(sum);
}

// Whether it is sure with which member the count or mass reaches `want`, which may be up to `slack` lower; then the cut is
// there. Each warp measures up to some members, so that few are left between two of them. Begins and ends with a meeting.
__device__ __forceinline__ bool find_member(const Choice& c, u32 count, bool by_mass, u64 want, u64 slack) {
  ChoiceShared& shared = c.shared;
#pragma unroll 1
  for (u32 p = c.warp(); p < PIVOTS; p += MK_WARPS) {
    const u64 place = shared.members[p * count / PIVOTS].order;
    const u64 sum = measure_up_to(c, shared.members, count, by_mass, place);
    if (c.lane() == 0) shared.pivots[p] = {place, sum};
  }
  if (c.thread() == 0) shared.edges = shared.search.found = 0;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  Member pivot{NO_LIMIT, 0};
  if (c.lane() < PIVOTS) pivot = shared.pivots[c.lane()];
  __syncwarp();
  const bool below = c.lane() < PIVOTS && pivot.weight + slack < want;
  const u64 after = warp_max_long(below ? pivot.order : 0), before = warp_max_long(below ? pivot.weight : 0);
  const u64 last = warp_min_long(pivot.weight >= want ? pivot.order : NO_LIMIT);
#pragma unroll 1
  for (u32 i = c.thread(); i < count; i += CONSUMERS) {
    const Member mine = shared.members[i];
    if (mine.order <= after || mine.order > last) continue;
    const u32 at = fetch_add_cta(&shared.edges, 1);
    if (at < EDGE_ROOM) shared.edge[at] = mine;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const u32 edges = shared.edges;
#pragma unroll 1
  for (u32 i = c.warp(); edges <= EDGE_ROOM && i < edges; i += MK_WARPS) {
    const Member mine = shared.edge[i];
    const u64 own = by_mass ? mine.weight : 1, sum = before + measure_up_to(c, shared.edge, edges, by_mass, mine.order);
    if (c.lane() == 0 && sum >= want && sum - own + slack < want) {
      shared.search.cut = mine.order;
      shared.search.found = 1;
    }
    __syncwarp();
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return shared.search.found;
}
