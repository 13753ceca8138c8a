// Four 8-bit products added to a 32-bit sum; every architecture since sm_61 has it.
#pragma once

#include "ptx/platform.cuh"

// sum + the products of four signed bytes with four signed bytes.
__device__ __forceinline__ i32 dp4a_ss(u32 a, u32 b, i32 sum) {
#ifdef __CUDACC__
  i32 result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
#else
  return shim::dot<signed char, signed char>(a, b, sum);
#endif
}

// sum + the products of four unsigned bytes with four signed bytes.
__device__ __forceinline__ i32 dp4a_us(u32 a, u32 b, i32 sum) {
#ifdef __CUDACC__
  i32 result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
#else
  return shim::dot<unsigned char, signed char>(a, b, sum);
#endif
}

// sum + four signed bytes.
__device__ __forceinline__ i32 add_bytes(u32 bytes, i32 sum) { return dp4a_ss(bytes, 0x01010101, sum); }
