// Exchange inside a full warp. All 32 lanes call the same one: the masks are not parameters.
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
