// The 16 barriers of a CTA. Number 0 belongs to __syncthreads(). `threads` counts those that meet there: a multiple of
// 32, and the same for all of them.
#pragma once

#include "ptx/platform.cuh"

__device__ __forceinline__ void barrier_sync(u32 id, u32 threads) {
#ifdef __CUDACC__
  __syncwarp();
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  shim::barrier_sync(id, threads);
#endif
}

// Counts this thread and goes on; the others wait in barrier_sync.
__device__ __forceinline__ void barrier_arrive(u32 id, u32 threads) {
#ifdef __CUDACC__
  __syncwarp();
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  shim::barrier_arrive(id, threads);
#endif
}

// Meets the others and returns to all of them whether any came with `predicate`. It is how threads agree to leave: one
// that failed still comes to the barrier, so nobody waits there for ever.
__device__ __forceinline__ bool barrier_any(u32 id, u32 threads, bool predicate) {
#ifdef __CUDACC__
  u32 any;
  __syncwarp();
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n barrier.cta.red.or.pred.aligned q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(predicate))
      : "memory");
  return any;
#else
  return shim::barrier_any(id, threads, predicate);
#endif
}
