// Fences. Each orders this thread's own accesses; none makes another thread wait.
#pragma once

#include "ptx/platform.cuh"

// Earlier accesses of this thread are visible to the GPU before later ones.
__device__ __forceinline__ void fence_gpu() {
#ifdef __CUDACC__
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
  shim::fence();
#endif
}

// The same for the host and other devices.
__device__ __forceinline__ void fence_sys() {
#ifdef __CUDACC__
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  shim::fence();
#endif
}

// Ordinary shared-memory stores before it are visible to bulk copies and tensor cores after it (the 'async proxy').
__device__ __forceinline__ void fence_proxy_async_shared() {
#ifdef __CUDACC__
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  shim::fence();
#endif
}

// Ordinary global stores before it are visible to bulk copies after it. Keys and values that a kernel appends with
// stores and reads back with bulk copies need it on the storing side, then a barrier, then the copy.
__device__ __forceinline__ void fence_proxy_async_global() {
#ifdef __CUDACC__
  asm volatile("fence.proxy.async.global;" ::: "memory");
#else
  shim::fence();
#endif
}

// mbarrier_init before it is visible to the cluster and to bulk copies; follow it with a CTA or cluster barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
#ifdef __CUDACC__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  shim::fence();
#endif
}
