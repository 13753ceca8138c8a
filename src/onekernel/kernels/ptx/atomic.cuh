// Read-modify-write on global memory and on shared memory. Never on floats: their sum would depend on who comes first.
#pragma once

#include "ptx/platform.cuh"

// Adds without returning the old value; orders nothing else.
__device__ __forceinline__ void add_relaxed_gpu(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::add(to, value, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void add_relaxed_gpu(u64* to, u64 value) {
#ifdef __CUDACC__
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  shim::add(to, value, shim::Order::RELAXED);
#endif
}

// Adds to a word in shared memory and returns what it was; orders nothing else.
__device__ __forceinline__ u32 fetch_add_cta(u32* to, u32 value) {
#ifdef __CUDACC__
  u32 old;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(shared_address(to)), "r"(value)
               : "memory");
  return old;
#else
  return shim::add(to, value, shim::Order::RELAXED);
#endif
}

// Raises a word in shared memory to a value; orders nothing else.
__device__ __forceinline__ void raise_cta(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(shared_address(to)), "r"(value) : "memory");
#else
  shim::raise(to, value);
#endif
}

// Adds, after everything this thread did before is visible to whoever acquires the sum.
__device__ __forceinline__ void add_release_gpu(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::add(to, value, shim::Order::RELEASE);
#endif
}

// Writes `wanted` if the word is `expected`, and returns what it was; orders nothing else.
__device__ __forceinline__ u64 compare_and_swap_gpu(u64* word, u64 expected, u64 wanted) {
#ifdef __CUDACC__
  u64 old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(word), "l"(expected), "l"(wanted)
               : "memory");
  return old;
#else
  return shim::compare_and_swap(word, expected, wanted);
#endif
}
