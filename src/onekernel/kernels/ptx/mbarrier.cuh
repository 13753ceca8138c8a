// mbarriers: an 8-byte word in shared memory that counts arrivals and the bytes of bulk copies.
//
// A phase ends when all arrivals came and no expected byte is missing; the barrier then starts its next phase by
// itself. A wait names the parity of the phase it waits for and cannot tell phase n from phase n - 2: whoever waits
// must be unable to fall two phases behind (see tile/ring.cuh).
#pragma once

#include "ptx/platform.cuh"

struct Mbarrier {
  u64 state;
};

// Makes the barrier expect `arrivals` per phase. One thread does it; fence_mbarrier_init and a CTA barrier follow.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, u32 arrivals) {
#ifdef __CUDACC__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#else
  shim::mbarrier_init(&barrier->state, arrivals);
#endif
}

// `arrivals` at once.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier, u32 arrivals = 1) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#else
  shim::mbarrier_arrive(&barrier->state, arrivals, 0);
#endif
}

// One arrival that also adds `bytes` to what the phase waits for. It comes before the copies it announces.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, u32 bytes) {
#ifdef __CUDACC__
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#else
  shim::mbarrier_arrive(&barrier->state, 1, bytes);
#endif
}

// Adds `bytes` to what the current phase waits for, without an arrival.
__device__ __forceinline__ void mbarrier_expect(Mbarrier* barrier, u32 bytes) {
#ifdef __CUDACC__
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#else
  shim::mbarrier_arrive(&barrier->state, 0, bytes);
#endif
}

// True if the phase of this parity has ended; what the arriving threads wrote before is then visible. Does not wait.
__device__ __forceinline__ bool mbarrier_test(const Mbarrier* barrier, u32 parity) {
#ifdef __CUDACC__
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
#else
  return shim::mbarrier_test(&barrier->state, parity);
#endif
}

// The same, but the hardware may suspend the thread for a short, bounded time before it answers false.
__device__ __forceinline__ bool mbarrier_try_wait(const Mbarrier* barrier, u32 parity) {
#ifdef __CUDACC__
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done;
#else
  return shim::mbarrier_test(&barrier->state, parity);
#endif
}
