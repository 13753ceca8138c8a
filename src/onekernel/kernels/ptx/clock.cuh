// Time inside a kernel.
#pragma once

#include "ptx/platform.cuh"

// This SM's cycle counter. Its rate is the SM clock, which is not the one that tools show under load.
__device__ __forceinline__ u64 clock_cycles() {
#ifdef __CUDACC__
  u64 cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
#else
  return shim::nanoseconds();
#endif
}

// Nanoseconds, the same on all SMs; it ticks in coarse steps (32 ns to 1 us, depending on the chip).
__device__ __forceinline__ u64 clock_ns() {
#ifdef __CUDACC__
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
#else
  return shim::nanoseconds();
#endif
}

// Sleeps for about `ns`, at most twice that; up to a millisecond.
__device__ __forceinline__ void sleep_ns(u32 ns) {
#ifdef __CUDACC__
  asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory");
#else
  (void)ns;
  shim::yield();
#endif
}
