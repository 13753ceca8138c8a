// Where a CTA's time goes, written down by builds with MK_TRACE for one token of a launch; in other builds this is empty.
//
// A CTA has two streams of words, that of its first computing thread and that of its loader. A stream begins with five
// words: how many marks follow, the SM's cycles and %globaltimer at its start, and both at its end, which tie the cycles
// to a time that all SMs share (their clocks run at a rate that tools do not show). A mark is Mark << 56 | id << 40 | cycles.
// onekernel/measure/marks.py reads them.
#pragma once

#include "ptx/clock.cuh"

// onekernel/measure/marks.py holds the same names.
enum class Mark : u32 {
  PHASE = 1,   // phase `id` begins: what it waits for now is values
  TAKEN = 2,   // all its inputs are in shared memory
  WEIGHTS = 3, // the cycles that the first warp has waited for stages of the ring in this phase, in place of the time
  MULTIPLIED = 4,  // the first warp has seen all its stages
  MET = 5,     // all warps have
  END = 6,     // what the phase gives is published
  ISSUED = 7,  // the loader starts a copy of `id` * 16 bytes
  LANDED = 8,  // the loader has seen its oldest copy land; `id` are still on their way
  FULL = 9,    // the loader begins to wait for a free stage
};

struct TraceBuffer {
  u64* words;  // (CTAs, 2, room)
  u32 room;    // words of a stream
  u32 token;   // whose marks are kept
};

// One thread's stream. What it costs is a store and a look at the clock for each mark.
template <bool ON>
struct Trace {
  u64* next = nullptr;
  u32 room = 0;  // 0 while another token is made
  u32 waited = 0;

  static __device__ __forceinline__ u64* stream(const TraceBuffer& buffer, u32 side) {
    return buffer.words + (static_cast<u64>(blockIdx.x) * 2 + side) * buffer.room;
  }

  __device__ __forceinline__ void begin(const TraceBuffer& buffer, u32 side) {
    u64* words = stream(buffer, side);
    words[0] = 0;
    words[1] = clock_cycles();
    words[2] = clock_ns();
    next = words + 5;
  }

  __device__ __forceinline__ void at_token(const TraceBuffer& buffer, u32 token) {
    room = token == buffer.token ? buffer.room - 5 : 0;
  }

  __device__ __forceinline__ void put(Mark mark, u32 id, u64 value) {
    if (room == 0) return;
    room--;
    *next++ = static_cast<u64>(mark) << 56 | static_cast<u64>(id & 0xffff) << 40 | (value & 0xffffffffffull);
  }

  __device__ __forceinline__ void mark(Mark mark, u32 id) { put(mark, id, clock_cycles()); }

  // Calls wait() and adds its cycles to what WEIGHTS tells.
  template <class Wait>
  __device__ __forceinline__ bool timed(Wait wait) {
    const u32 since = static_cast<u32>(clock_cycles());
    const bool ok = wait();
    waited += static_cast<u32>(clock_cycles()) - since;
    return ok;
  }

  __device__ __forceinline__ void weights(u32 phase) {
    put(Mark::WEIGHTS, phase, waited);
    waited = 0;
  }

  __device__ __forceinline__ void end(const TraceBuffer& buffer, u32 side) {
    u64* words = stream(buffer, side);
    words[0] = static_cast<u64>(next - words) - 5;
    words[3] = clock_cycles();
    words[4] = clock_ns();
  }
};

template <>
struct Trace<false> {
  __device__ __forceinline__ void begin(const TraceBuffer&, u32) {}
  __device__ __forceinline__ void at_token(const TraceBuffer&, u32) {}
  __device__ __forceinline__ void mark(Mark, u32) {}
  template <class Wait>
  __device__ __forceinline__ bool timed(Wait wait) {
    return wait();
  }
  __device__ __forceinline__ void weights(u32) {}
  __device__ __forceinline__ void end(const TraceBuffer&, u32) {}
};
