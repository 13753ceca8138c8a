// The only loops that wait for a word. Every wait counts its turns, now and then looks at the abort word, and gives up
// when that is set or when it has waited too long; then it records who waited for what and returns false. The caller
// drains its copies, comes to the barriers where others expect it, and leaves. So a stuck kernel ends by itself, says
// why, and the CUDA context lives on, which a trap would cost.
#pragma once

#include "ptx/access.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/platform.cuh"

// What a thread waited for. onekernel/device/watch.py holds the same names.
enum class Wait : u32 {
  LANDED = 1,  // a bulk copy into ring stage `id`
  FREED = 2,   // the consumers of ring stage `id`
  VALUE = 3,   // the tagged word `id`
  SHARE = 4,   // the tagged word `id` in a cluster's distributed shared memory
  APPENDED = 5,  // keys and values of layer `id` to be appended by this CTA
  CHOICE = 6,  // the tagged word `id` of the choice of a token
};

struct Watch {
  u32* abort;     // one word in pinned or global memory: 0 means go on
  u64* records;   // (CTAs, warps, 4): Wait | expired << 32, id, expected, seen; zero before the launch
  u32 max_turns;  // of one wait; whoever exceeds it sets the abort word
};

// When all threads of an H200 wait in vain, a turn takes 2 us for a word (L2 is crowded) and 4 us for an mbarrier
// (which suspends the thread): an abort is seen within 2 to 4 ms. The abort word may lie beyond PCIe, so looks are
// rare.
constexpr u32 TURNS_PER_LOOK = 1024;

// The first lane of a warp to give up keeps its record.
__device__ __forceinline__ bool gives_up(const Watch& watch, u32 turns, Wait kind, u32 id, u64 expected, u64 seen) {
  const bool expired = turns >= watch.max_turns;
  if (!expired && load_relaxed_sys(watch.abort) == 0) return false;
  u64* record = watch.records + (static_cast<u64>(blockIdx.x) * (blockDim.x / WARP) + warp_index()) * 4;
  if (compare_and_swap_gpu(record, 0, static_cast<u64>(kind) | static_cast<u64>(expired) << 32) == 0) {
    record[1] = id;
    record[2] = expected;
    record[3] = seen;
  }
  if (expired) store_relaxed_sys(watch.abort, 1);
  return true;
}

// Waits until ready(), which looks once; seen() says what it saw, if it comes to that. False: give up.
template <class Ready, class Seen>
__device__ __forceinline__ bool spin(const Watch& watch, Wait kind, u32 id, u64 expected, Ready ready, Seen seen) {
  for (u32 turns = 1; !ready(); turns++) {
    spin_pause();
    if (turns % TURNS_PER_LOOK == 0 && gives_up(watch, turns, kind, id, expected, seen())) return false;
  }
  return true;
}

// The same with a ready(seen) that says what it saw each time.
template <class Ready>
__device__ __forceinline__ bool spin(const Watch& watch, Wait kind, u32 id, u64 expected, Ready ready) {
  u64 seen = 0;
  return spin(watch, kind, id, expected, [&] { return ready(seen); }, [&] { return seen; });
}

// Waits for the end of the mbarrier's phase of this parity. False: give up.
__device__ __forceinline__ bool spin_mbarrier(const Watch& watch, Wait kind, u32 id, const Mbarrier* barrier,
                                              u32 parity) {
  return spin(watch, kind, id, parity, [&](u64& seen) {
    seen = parity ^ 1;
    return mbarrier_try_wait(barrier, parity);
  });
}

// Waits for copies that are on their way and land whatever else happens: the one wait that nothing cuts short.
__device__ __forceinline__ void drain_mbarrier(const Mbarrier* barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) spin_pause();
}
