// Powers of two, as fast as the hardware has them.
#pragma once

#include "ptx/platform.cuh"

// 2^x within 2 units in the last place; exactly 1 for 0, and 0 for minus infinity and for what would be denormal.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDACC__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return exp2f(x);
#endif
}
