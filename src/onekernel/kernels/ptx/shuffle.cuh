// Exchange and sums inside a full warp. All 32 lanes call the same one: the masks are not parameters.
#pragma once

#include "ptx/platform.cuh"

// The value of lane (own lane ^ mask).
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, u32 mask) {
#ifdef __CUDACC__
  return __shfl_xor_sync(0xffffffff, value, mask);
#else
  return shim::shuffle(value, shim::lane() ^ mask);
#endif
}

// The value of lane `source`.
template <class T>
__device__ __forceinline__ T shuffle_index(T value, u32 source) {
#ifdef __CUDACC__
  return __shfl_sync(0xffffffff, value, source);
#else
  return shim::shuffle(value, source % WARP);
#endif
}

// The value of lane (own lane + distance); the last lanes, which have none, keep their own.
template <class T>
__device__ __forceinline__ T shuffle_down(T value, u32 distance) {
#ifdef __CUDACC__
  return __shfl_down_sync(0xffffffff, value, distance);
#else
  return shim::shuffle(value, shim::lane() + distance < WARP ? shim::lane() + distance : shim::lane());
#endif
}

// Bit l is lane l's predicate.
__device__ __forceinline__ u32 warp_ballot(bool predicate) {
#ifdef __CUDACC__
  return __ballot_sync(0xffffffff, predicate);
#else
  return shim::ballot(predicate);
#endif
}

// The highest of all lanes' values: one instruction where shuffles would take five rounds.
__device__ __forceinline__ u32 warp_max(u32 value) {
#ifdef __CUDACC__
  u32 highest;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(highest) : "r"(value));
  return highest;
#else
  return shim::warp_max(value);
#endif
}

__device__ __forceinline__ u32 warp_min(u32 value) { return ~warp_max(~value); }

// The sum of all lanes' values, modulo 2**32.
__device__ __forceinline__ u32 warp_sum(u32 value) {
#ifdef __CUDACC__
  u32 sum;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(value));
  return sum;
#else
  return shim::warp_sum(value);
#endif
}
