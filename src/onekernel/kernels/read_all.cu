// Reads memory once and does next to nothing with it: what this takes is the floor for every kernel that reads as much.
// Each CTA also notes cycles and nanoseconds over its life: the SM clock under this load.
//
// Constants: READ_THREADS, READ_LOADS (16-byte loads in flight per thread).
#include "ptx/clock.cuh"
#include "ptx/platform.cuh"

extern "C" __global__ void __launch_bounds__(READ_THREADS)
    read_all(const uint4* data,  // (vectors)
             u64 vectors,
             u32* sums,          // (threads of the grid): xor of what each read
             u64* times) {       // (CTAs, 2): cycles, ns
  const u64 cycles = clock_cycles(), ns = clock_ns();
  const u64 stride = static_cast<u64>(gridDim.x) * READ_THREADS;
  u64 at = static_cast<u64>(blockIdx.x) * READ_THREADS + threadIdx.x;
  u32* out = sums + at;
  u32 sum = 0;
  for (; at + (READ_LOADS - 1) * stride < vectors; at += READ_LOADS * stride) {
    uint4 v[READ_LOADS];
#pragma unroll
    for (u32 i = 0; i < READ_LOADS; i++) v[i] = data[at + i * stride];
#pragma unroll
    for (u32 i = 0; i < READ_LOADS; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  for (; at < vectors; at += stride) sum ^= data[at].x ^ data[at].y ^ data[at].z ^ data[at].w;
  *out = sum;
  if (threadIdx.x == 0) {
    times[blockIdx.x * 2] = clock_cycles() - cycles;
    times[blockIdx.x * 2 + 1] = clock_ns() - ns;
  }
}
