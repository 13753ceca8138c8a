// What every source starts from: short integer names, a thread's place, and the CTA's shared memory.
//
// Nothing here or elsewhere in kernels/ includes a CUDA header: NVRTC needs none for what we use, and the shim (which
// the CPU build includes first, see shim/shim.h) need not imitate any.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr u32 WARP = 32;

__device__ __forceinline__ u32 lane_index() { return threadIdx.x % WARP; }
__device__ __forceinline__ u32 warp_index() { return threadIdx.x / WARP; }

// The dynamic shared memory of this CTA, aligned to 128 bytes. Kernels use no other: on the CPU it is one heap block of
// exactly the size given to the launch, so AddressSanitizer sees an access past it.
__device__ __forceinline__ u8* dynamic_shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) u8 dynamic_shared_bytes[];
  return dynamic_shared_bytes;
#else
  return shim::shared_memory();
#endif
}

// An address in the shared window, as shared-memory instructions take it: 32 bits on the device, a pointer on the CPU.
#ifdef __CUDACC__
using SharedAddress = u32;
#else
using SharedAddress = u8*;
#endif

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
#ifdef __CUDACC__
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#else
  return static_cast<u8*>(const_cast<void*>(pointer));
#endif
}

// What a thread does between two looks at a word. On the CPU it lets the other threads of the CTA run: without this a
// wait inside one CTA would never end there.
__device__ __forceinline__ void spin_pause() {
#ifndef __CUDACC__
  shim::yield();
#endif
}
