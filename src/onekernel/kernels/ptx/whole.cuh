// Floats on their way to whole numbers, by instructions that all of a processor's lanes have at once: conversions run on an
// eighth of them.
#pragma once

#include "ptx/platform.cuh"

// The larger one; NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
#ifdef __CUDACC__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return b > a || b != b ? b : a;
#endif
}

// A float of this size has steps of 1, and bits that count from here.
constexpr float WHOLE_STEPS = 12582912.0f;

// Adds WHOLE_STEPS to a number of a size up to 2**22, which rounds it to whole, half to even. The low bits of the sum are
// those of the whole number as an integer.
__device__ __forceinline__ float to_whole(float value) { return __fadd_rn(value, WHOLE_STEPS); }

// The low bytes of four sums of to_whole: four int8.
__device__ __forceinline__ u32 four_bytes(float a, float b, float c, float d) {
  const u32 bits[4] = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
#ifdef __CUDACC__
  u32 low, high, four;
  asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(low) : "r"(bits[0]), "r"(bits[1]));
  asm("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(high) : "r"(bits[2]), "r"(bits[3]));
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(four) : "r"(low), "r"(high));
  return four;
#else
  return (bits[0] & 0xff) | (bits[1] & 0xff) << 8 | (bits[2] & 0xff) << 16 | bits[3] << 24;
#endif
}
