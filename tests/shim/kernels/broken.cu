// Kernels that break one rule each, chosen by `part`: what the shim must say about them.
#include "ptx/access.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/copy.cuh"
#include "ptx/fence.cuh"
#include "ptx/shuffle.cuh"

__device__ Mbarrier* start_copy(const u32* memory, u8* to) {
  Mbarrier* landed = reinterpret_cast<Mbarrier*>(dynamic_shared() + 512);
  if (threadIdx.x == 0) {
    mbarrier_init(landed, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(landed, 256);
    bulk_copy(to, memory, 256, landed, CachePolicy::EVICT_FIRST);
  }
  __syncthreads();
  return landed;
}

// One word guards another, but neither store orders the other. memory: (64) zeros; memory[8] = 1 if it went wrong.
__device__ void trust_a_flag(u32* memory, bool release) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    store_relaxed_gpu(&memory[0], 42u);
    if (release)
      store_release_gpu(&memory[4], 1u);
    else
      store_relaxed_gpu(&memory[4], 1u);
    for (u32 i = 0; i < 300; i++) spin_pause();
  } else {
    while (load_acquire_gpu(&memory[4]) == 0) spin_pause();
    memory[8] = load_relaxed_gpu(&memory[0]) != 42;
  }
}

extern "C" __global__ void __launch_bounds__(64) broken(i32 part, u32* memory) {  // (64)
  u8* shared = dynamic_shared();
  u32* words = reinterpret_cast<u32*>(shared);
  const u32 thread = threadIdx.x;
  switch (part) {
    case 0: return trust_a_flag(memory, false);
    case 1: return trust_a_flag(memory, true);
    case 2: start_copy(memory, shared); return;  // ends with the copy on its way
    case 3: return barrier_sync(1, thread < 32 ? 64 : 32);
    case 4:
      if (lane_index() < 16) memory[thread] = shuffle_xor(thread, 1);
      else warp_ballot(true);
      return;
    case 5:  // nobody frees these
      if (thread < 32) barrier_sync(2, 64);
      else __syncthreads();
      return;
    case 6: {
      Mbarrier* landed = start_copy(memory, shared);
      while (!mbarrier_test(landed, 0)) spin_pause();
      if (thread == 0) mbarrier_arrive(landed);
      if (thread == 0) mbarrier_arrive(landed);  // fine: these end phases 1 and 2
      if (thread == 0) mbarrier_init(landed, 2);
      if (thread == 0) mbarrier_arrive_expect(landed, 16);
      if (thread == 0) mbarrier_arrive(landed);
      if (thread == 0) mbarrier_arrive(landed);  // the third of two, while 16 bytes are missing
      return;
    }
    case 7: return mbarrier_arrive(reinterpret_cast<Mbarrier*>(shared));  // never initialised
    case 8: start_copy(memory, shared + 896); return;                     // ends past the shared memory
    case 9: start_copy(memory, shared + 4); return;                       // not aligned
    case 10:                                                              // writes to a CTA that may have ended
      if (blockIdx.x == 1 && thread == 0) {
        for (u32 i = 0; i < 3000; i++) spin_pause();
        cluster_store_relaxed(cluster_address(shared, 0), 1);
      }
      return;
    case 11: memory[thread] = words[thread + 256]; return;  // AddressSanitizer: past the shared memory
    case 12: memory[thread + 1] = 1; return;                // AddressSanitizer: past a global buffer
    case 13: {                                              // AddressSanitizer: reads a copy that may not have landed
      Mbarrier* landed = start_copy(memory, shared);
      memory[thread] = words[thread];
      while (!mbarrier_test(landed, 0)) spin_pause();
      return;
    }
    case 14: memory[thread] = 1 << (memory[thread] + 32); return;  // UBSan: a shift too far
    case 15:                                                       // ThreadSanitizer: no barrier between
      words[thread] = thread;
      memory[thread] = words[thread ^ 32];
      return;
    case 16:
      words[thread] = thread;
      __syncthreads();
      memory[thread] = words[thread ^ 32];
      return;
    case 17:  // ends before its copy has landed
      async_copy(shared + thread * 16, memory, true);
      async_copies_commit();
      return;
    case 18: return async_copy(shared + 1024, memory, true);  // past the shared memory
    case 19: return async_copy(shared, memory + 1, true);     // from an address that is not aligned
  }
}
