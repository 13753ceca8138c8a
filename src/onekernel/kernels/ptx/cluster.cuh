// Clusters: CTAs that are resident together and reach each other's shared memory ('distributed' shared memory).
//
// A CTA must not end while another may still write to it or read from it: cluster_arrive and cluster_wait come last.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/platform.cuh"

__device__ __forceinline__ u32 cluster_rank() {
#ifdef __CUDACC__
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return shim::cluster_rank();
#endif
}

__device__ __forceinline__ u32 cluster_size() {
#ifdef __CUDACC__
  u32 size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return shim::cluster_size();
#endif
}

// All threads of all CTAs of the cluster arrive, then wait: what was written before an arrive is visible after the
// wait.
__device__ __forceinline__ void cluster_arrive() {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  shim::cluster_arrive();
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef __CUDACC__
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  shim::cluster_wait();
#endif
}

// Where this CTA's shared object `local` lies in the CTA of the cluster with this rank.
__device__ __forceinline__ SharedAddress cluster_address(const void* local, u32 rank) {
#ifdef __CUDACC__
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
#else
  return shim::cluster_address(local, rank);
#endif
}

__device__ __forceinline__ void cluster_store_relaxed(SharedAddress to, u64 value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(to), "l"(value) : "memory");
#else
  shim::cluster_store(to, value);
#endif
}

__device__ __forceinline__ u64 cluster_load_relaxed(SharedAddress from) {
#ifdef __CUDACC__
  u64 value;
  asm volatile("ld.relaxed.cluster.shared::cluster.b64 %0, [%1];" : "=l"(value) : "r"(from) : "memory");
  return value;
#else
  return shim::cluster_load(from);
#endif
}

// Stores a word into another CTA and tells the mbarrier `landed` of that same CTA that 8 bytes came. Like a bulk copy
// it goes on by itself: the reader waits for the mbarrier, needs no tag, and the data are visible with it. Only in a
// launch with clusters: in one without, an H200 ends the kernel with an error even if a CTA stores into itself.
__device__ __forceinline__ void cluster_store_async(SharedAddress to, u64 value, SharedAddress landed) {
#ifdef __CUDACC__
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to), "l"(value),
               "r"(landed)
               : "memory");
#else
  shim::cluster_store_async(to, value, landed);
#endif
}

// Arrives at an mbarrier of another CTA.
__device__ __forceinline__ void cluster_mbarrier_arrive(SharedAddress barrier) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  shim::cluster_mbarrier_arrive(barrier);
#endif
}
