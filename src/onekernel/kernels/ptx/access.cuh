// Accesses to global memory that other CTAs, the host or other devices take part in.
//
// Relaxed: the access itself is whole and seen once, and orders nothing else. This is what a word that carries its own
// tag needs. Release before acquire: what the storing thread did before its release is visible after the acquire that
// reads it. gpu: between CTAs. sys: with the host too. A pair is two such words, not one of 16 bytes.
#pragma once

#include "ptx/platform.cuh"

struct Pair {
  u64 first, second;
};

// Between CTAs: gpu scope.

__device__ __forceinline__ u32 load_relaxed_gpu(const u32* from) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ u64 load_relaxed_gpu(const u64* from) {
#ifdef __CUDACC__
  u64 value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ Pair load_relaxed_gpu(const Pair* from) {
#ifdef __CUDACC__
  Pair value;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(from)
               : "memory");
  return value;
#else
  return {shim::load(&from->first, shim::Order::RELAXED), shim::load(&from->second, shim::Order::RELAXED)};
#endif
}

__device__ __forceinline__ u32 load_acquire_gpu(const u32* from) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::ACQUIRE);
#endif
}

__device__ __forceinline__ u64 load_acquire_gpu(const u64* from) {
#ifdef __CUDACC__
  u64 value;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::ACQUIRE);
#endif
}

__device__ __forceinline__ Pair load_acquire_gpu(const Pair* from) {
#ifdef __CUDACC__
  Pair value;
  asm volatile("ld.acquire.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(from)
               : "memory");
  return value;
#else
  return {shim::load(&from->first, shim::Order::ACQUIRE), shim::load(&from->second, shim::Order::ACQUIRE)};
#endif
}

__device__ __forceinline__ void store_relaxed_gpu(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_relaxed_gpu(u64* to, u64 value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_relaxed_gpu(Pair* to, Pair value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(value.first), "l"(value.second)
               : "memory");
#else
  shim::store(&to->first, value.first, shim::Order::RELAXED);
  shim::store(&to->second, value.second, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_release_gpu(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELEASE);
#endif
}

__device__ __forceinline__ void store_release_gpu(u64* to, u64 value) {
#ifdef __CUDACC__
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELEASE);
#endif
}

__device__ __forceinline__ void store_release_gpu(Pair* to, Pair value) {
#ifdef __CUDACC__
  asm volatile("st.release.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(value.first), "l"(value.second)
               : "memory");
#else
  shim::store(&to->first, value.first, shim::Order::RELEASE);
  shim::store(&to->second, value.second, shim::Order::RELEASE);
#endif
}

// With the host: sys scope.

__device__ __forceinline__ u32 load_relaxed_sys(const u32* from) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ u64 load_relaxed_sys(const u64* from) {
#ifdef __CUDACC__
  u64 value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ Pair load_relaxed_sys(const Pair* from) {
#ifdef __CUDACC__
  Pair value;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(from)
               : "memory");
  return value;
#else
  return {shim::load(&from->first, shim::Order::RELAXED), shim::load(&from->second, shim::Order::RELAXED)};
#endif
}

__device__ __forceinline__ u32 load_acquire_sys(const u32* from) {
#ifdef __CUDACC__
  u32 value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::ACQUIRE);
#endif
}

__device__ __forceinline__ u64 load_acquire_sys(const u64* from) {
#ifdef __CUDACC__
  u64 value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
#else
  return shim::load(from, shim::Order::ACQUIRE);
#endif
}

__device__ __forceinline__ Pair load_acquire_sys(const Pair* from) {
#ifdef __CUDACC__
  Pair value;
  asm volatile("ld.acquire.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(value.first), "=l"(value.second)
               : "l"(from)
               : "memory");
  return value;
#else
  return {shim::load(&from->first, shim::Order::ACQUIRE), shim::load(&from->second, shim::Order::ACQUIRE)};
#endif
}

__device__ __forceinline__ void store_relaxed_sys(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_relaxed_sys(u64* to, u64 value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_relaxed_sys(Pair* to, Pair value) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(value.first), "l"(value.second)
               : "memory");
#else
  shim::store(&to->first, value.first, shim::Order::RELAXED);
  shim::store(&to->second, value.second, shim::Order::RELAXED);
#endif
}

__device__ __forceinline__ void store_release_sys(u32* to, u32 value) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELEASE);
#endif
}

__device__ __forceinline__ void store_release_sys(u64* to, u64 value) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
  shim::store(to, value, shim::Order::RELEASE);
#endif
}

__device__ __forceinline__ void store_release_sys(Pair* to, Pair value) {
#ifdef __CUDACC__
  asm volatile("st.release.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(value.first), "l"(value.second)
               : "memory");
#else
  shim::store(&to->first, value.first, shim::Order::RELEASE);
  shim::store(&to->second, value.second, shim::Order::RELEASE);
#endif
}
