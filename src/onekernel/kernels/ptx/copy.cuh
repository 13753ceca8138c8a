// Copies of 16 bytes from global to shared memory that go on while their thread does (cp.async). A thread waits for its
// own copies, in the groups in which it committed them; a barrier after that shows them to the others. Works from sm_80
// on and needs no mbarrier, so nothing can hang: the way where every thread both copies and computes.
#pragma once

#include "ptx/platform.cuh"

// Starts copying 16 bytes, past L1. Both addresses are multiples of 16. Without `valid` nothing is read and zeros come.
__device__ __forceinline__ void async_copy(void* to, const void* from, bool valid) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#else
  shim::async_copy(to, from, valid);
#endif
}

// The same through L1, for what other warps of this SM read too.
__device__ __forceinline__ void async_copy_cached(void* to, const void* from, bool valid) {
#ifdef __CUDACC__
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#else
  shim::async_copy(to, from, valid);
#endif
}

// Ends this thread's group of copies; one may be empty.
__device__ __forceinline__ void async_copies_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  shim::async_copies_commit();
#endif
}

// Returns when all groups of this thread but the last LEFT have landed.
template <u32 LEFT>
__device__ __forceinline__ void async_copies_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
  shim::async_copies_wait(LEFT);
#endif
}
