// One word in shared memory through which threads of a CTA tell each other something without meeting at a barrier.
#pragma once

#include "ptx/platform.cuh"

// What the storing thread did before is visible after the load that reads it.
__device__ __forceinline__ u32 load_acquire_cta(const u32* from) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.acquire.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(from)) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::ACQUIRE);
#endif
}

__device__ __forceinline__ void store_release_cta(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("st.release.cta.shared::cta.b32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELEASE);
#endif
}
