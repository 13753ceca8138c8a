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

// The SM's cycles and the common time, read when the latter has just changed: it does so about once in a microsecond.
__device__ __forceinline__ void both_clocks(u64* words) {
  const u64 before = clock_ns();
  u64 now = before;
#pragma unroll 1
  for (u32 looks = 0; now == before && looks < 1u << 16; looks++) now = clock_ns();
  words[0] = clock_cycles();
  words[1] = now;
}

// Where one thread's stream stands. It lies in shared memory: registers are short, and spilled they would lie in L2.
struct alignas(16) TraceState {
  u64* next;
  u32 room;    // words; 0 while another token is made
  u32 waited;  // cycles
};

// One thread's stream. What it costs is a store, a look at the clock and one at its state for each mark.
template <bool ON>
struct Trace {
  static constexpr u32 LOOK = 64;  // cycles that a wait takes whose stage is there
  TraceState* state;

  __device__ __forceinline__ explicit Trace(TraceState* state = nullptr) : state(state) {}

  static __device__ __forceinline__ u64* stream(const TraceBuffer& buffer, u32 side) {
    return buffer.words + (static_cast<u64>(blockIdx.x) * 2 + side) * buffer.room;
  }

  __device__ __forceinline__ void begin(const TraceBuffer& buffer, u32 side) {
    u64* words = stream(buffer, side);
    words[0] = 0;
    both_clocks(words + 1);
    *state = TraceState{words + 5, 0, 0};
  }

  __device__ __forceinline__ void at_token(const TraceBuffer& buffer, u32 token) {
    state->room = token == buffer.token ? buffer.room - 5 : 0;
    state->waited = 0;
  }

  __device__ __forceinline__ void put(Mark mark, u32 id, u64 value) {
    const u32 room = state->room;
    if (room == 0) return;
    state->room = room - 1;
    u64* const next = state->next;
    state->next = next + 1;
    *next = static_cast<u64>(mark) << 56 | static_cast<u64>(id & 0xffff) << 40 | (value & 0xffffffffffull);
  }

  __device__ __forceinline__ void mark(Mark mark, u32 id) { put(mark, id, clock_cycles()); }

  // Calls wait(), by all threads, and adds the first one's cycles to what WEIGHTS tells.
  template <class Wait>
  __device__ __forceinline__ bool timed(Wait wait) {
    const u32 since = static_cast<u32>(clock_cycles());
    const bool ok = wait();
    const u32 waited = static_cast<u32>(clock_cycles()) - since;
    if (threadIdx.x == 0 && waited > LOOK) state->waited += waited;
    return ok;
  }

  __device__ __forceinline__ void weights(u32 phase) {
    put(Mark::WEIGHTS, phase, state->waited);
    state->waited = 0;
  }

  __device__ __forceinline__ void end(const TraceBuffer& buffer, u32 side) {
    u64* words = stream(buffer, side);
    words[0] = static_cast<u64>(state->next - words) - 5;
    both_clocks(words + 3);
  }
};

template <>
struct Trace<false> {
  __device__ __forceinline__ explicit Trace(TraceState* = nullptr) {}
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
