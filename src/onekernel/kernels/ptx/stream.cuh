// Loads of weights that one thread reads once: past L1, where they would only drive out what is read again. They stay in
// the order in which they stand among barriers and waits, so a load that is issued early is on its way early.
#pragma once

#include "ptx/platform.cuh"

__device__ __forceinline__ uint4 load_once(const uint4* from) {
#ifdef __CUDACC__
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
#else
  return *from;
#endif
}

__device__ __forceinline__ uint2 load_once(const uint2* from) {
#ifdef __CUDACC__
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
#else
  return *from;
#endif
}

// Asks L2 for the 32 bytes at `from`, of each lane its own. Nothing tells when they have come.
__device__ __forceinline__ void prefetch(const void* from) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#else
  shim::prefetch(from);
#endif
}
