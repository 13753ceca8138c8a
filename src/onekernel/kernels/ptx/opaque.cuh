// A value whose origin the compiler forgets, so that it does not keep what follows from it in registers for a whole loop:
// where every register is taken, that would push others out of the loop's hot part.
#pragma once

#include "ptx/platform.cuh"

__device__ __forceinline__ u32 forget(u32 value) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(value));
#endif
  return value;
}
