// bf16 pairs in 32-bit words: the first value in the low half.
#pragma once

#include "ptx/platform.cuh"

__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds both to nearest even.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
#ifdef __CUDACC__
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return shim::bf16(low) | static_cast<u32>(shim::bf16(high)) << 16;
#endif
}
