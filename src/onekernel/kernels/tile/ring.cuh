// A ring of stages in shared memory: one producer thread fills them with bulk copies, consumer warps empty them.
//
// A wait sees only the parity of a round, so a warp that skipped a stage in one round could take round r - 2 for round r.
// A warp may therefore leave a stage to others only if it meets them before it waits for that stage again, or if it leaves
// them that stage in every round until then.
#pragma once

#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "tile/spin.cuh"

// A position in the endless sequence of stages.
template <u32 STAGES>
struct Cursor {
  u32 stage = 0, round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      round++;
    }
  }

  // By fewer stages than there are.
  template <u32 STEP>
  __device__ __forceinline__ void skip() {
    stage += STEP;
    if (stage < STAGES) return;
    stage -= STAGES;
    round++;
  }

  __device__ __forceinline__ void advance(u32 stages) {
    const u32 to = stage + stages;
    stage = to % STAGES;
    round += to / STAGES;
  }
};

template <u32 STAGES, u32 STAGE_BYTES, u32 CONSUMER_WARPS>
struct Ring {
  u8* stages;        // (STAGES, STAGE_BYTES), 128-byte aligned
  Mbarrier* landed;  // (STAGES): one arrival, by the producer, and the bytes of the copy
  Mbarrier* freed;   // (STAGES): as many arrivals as there are consumer warps

  static constexpr u32 BYTES = STAGES * (STAGE_BYTES + 2 * sizeof(Mbarrier));

  __device__ __forceinline__ explicit Ring(u8* shared)
      : stages(shared), landed(reinterpret_cast<Mbarrier*>(shared + STAGES * STAGE_BYTES)), freed(landed + STAGES) {}

  // One thread; a CTA barrier follows.
  __device__ __forceinline__ void init() {
    for (u32 i = 0; i < STAGES; i++) {
      mbarrier_init(&landed[i], 1);
      mbarrier_init(&freed[i], CONSUMER_WARPS);
    }
    fence_mbarrier_init();
  }

  // Consumer warps: waits until the stage's bytes are there. Lanes may give up one by one: a warp that leaves on false
  // must first agree.
  __device__ __forceinline__ bool take(const Watch& watch, const Cursor<STAGES>& at) {
    return spin_mbarrier(watch, Wait::LANDED, at.stage, &landed[at.stage], at.round & 1);
  }

  // Consumer warps: after the last read of the stage by any lane. All lanes call it, also those that gave up; without
  // `taken` the stage was not there, and freeing it would count twice in one round. `shares`: warps that it speaks for.
  __device__ __forceinline__ void free(const Cursor<STAGES>& at, bool taken = true, u32 shares = 1) {
    __syncwarp();
    if (lane_index() == 0 && taken) mbarrier_arrive(&freed[at.stage], shares);
  }
};

// The producer's side. `window` bounds the stages on their way to what the memory needs to be busy: a ring full of
// requests would make every small access (tags, values) wait behind microseconds of weights.
template <u32 STAGES, u32 STAGE_BYTES, u32 CONSUMER_WARPS>
struct Producer {
  Ring<STAGES, STAGE_BYTES, CONSUMER_WARPS> ring;
  u32 window;              // 1 to STAGES
  Cursor<STAGES> at;       // the next stage to fill
  Cursor<STAGES> pending;  // the oldest stage that may not have landed
  u32 in_flight = 0;

  // Starts the copy of the next stage once it is free and fewer than `window` are on their way; with a `second` source,
  // `bytes` of that too, to `second_at` in the stage. False: give up.
  __device__ __forceinline__ bool fill(const Watch& watch, const u8* source, u32 bytes, const u8* second = nullptr,
                                       u32 second_at = 0) {
    if (at.round > 0 && !spin_mbarrier(watch, Wait::FREED, at.stage, &ring.freed[at.stage], (at.round - 1) & 1))
      return false;
    while (in_flight >= window) {  // more than `window` are on their way after it has shrunk
      const u32 oldest = pending.stage;
      if (!spin_mbarrier(watch, Wait::LANDED, oldest, &ring.landed[oldest], pending.round & 1)) return false;
      pending.advance();
      in_flight--;
    }
    Mbarrier* landed = &ring.landed[at.stage];
    u8* stage = ring.stages + at.stage * STAGE_BYTES;
    mbarrier_arrive_expect(landed, second == nullptr ? bytes : 2 * bytes);
    bulk_copy(stage, source, bytes, landed, CachePolicy::EVICT_FIRST);
    if (second != nullptr) bulk_copy(stage + second_at, second, bytes, landed, CachePolicy::EVICT_FIRST);
    at.advance();
    in_flight++;
    return true;
  }

  // Waits for all copies on their way. A CTA that ended before would have its shared memory written to afterwards.
  __device__ __forceinline__ void drain() {
    for (; in_flight > 0; in_flight--, pending.advance())
      drain_mbarrier(&ring.landed[pending.stage], pending.round & 1);
  }
};
