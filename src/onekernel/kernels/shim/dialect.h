// The words of CUDA C++ that kernels use besides the wrappers in ptx/. What is not here does not compile on the CPU,
// which keeps kernels to a small language; __shared__ is left out on purpose (see dynamic_shared in ptx/platform.cuh).
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __grid_constant__
#define __grid_constant__

#define threadIdx (::shim::thread_index())
#define blockIdx (::shim::block_index())
#define blockDim (::shim::block_dim())
#define gridDim (::shim::grid_dim())

inline void __syncthreads() { shim::barrier_sync(0, shim::block_dim().x); }
inline void __syncwarp(unsigned mask = ~0u) { shim::warp_sync(mask); }

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To shim_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits as another type");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}
inline float __uint_as_float(unsigned bits) { return shim_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return shim_bits<unsigned>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float value) { return expf(value); }
inline float __logf(float value) { return logf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
using std::ceil;
using std::max;
using std::min;
