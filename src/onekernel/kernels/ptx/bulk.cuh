// Bulk copies (the copy engine of sm_90): one thread starts a copy of any size, an mbarrier counts its bytes.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/platform.cuh"

// What L2 should do with the lines that a copy reads: the encoded policies of createpolicy.fractional at 1.0, as
// CUTLASS spells them.
enum class CachePolicy : u64 {
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12F0000000000000,
  EVICT_LAST = 0x14F0000000000000,
};

// Starts copying `bytes` from global to this CTA's shared memory; `landed` then sees that many bytes. Both addresses
// and `bytes` are multiples of 16. A CTA must not end while a copy into it is on its way.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, Mbarrier* landed, CachePolicy policy) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(landed)), "l"(static_cast<u64>(policy))
      : "memory");
#else
  (void)policy;
  shim::bulk_copy(to, from, bytes, &landed->state);
#endif
}

// Asks L2 to fetch `bytes` at `from`; same alignment. Nothing tells when they have come.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {
#ifdef __CUDACC__
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
  shim::bulk_prefetch(from, bytes);
#endif
}
