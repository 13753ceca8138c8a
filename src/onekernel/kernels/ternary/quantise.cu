// Root-mean-square norm and quantisation to int8 of one token a CTA: q = round(y * inverse), half to even, with inverse =
// 127 / max|y| and y = x / sqrt(mean(x^2) + eps) * weight, or y = x without a norm.
//
// Sums of squares are in double, so that the float the root is taken of does not depend on the order of the sum; root and
// divisions are the exactly rounded ones. With bf16 input the normalised value and its product with the weight are each
// rounded to bf16, as models in that type round them. A value that is no number makes inverse NaN or 0, and so
// every product with this token no number either.
//
// Constants: QUANTISE_THREADS, QUANTISE_BF16 (1: x is bf16, 0: float), QUANTISE_NORM (0: without one).
#include "ptx/convert.cuh"
#include "ptx/platform.cuh"
#include "ptx/shuffle.cuh"

constexpr u32 THREADS = QUANTISE_THREADS, WARPS = THREADS / WARP;
constexpr float LEAST = 1e-5f;  // of max|y|: as the models do

__device__ __forceinline__ float rounded(float value) { return QUANTISE_BF16 ? bf16_low(bf16_pair(value, 0)) : value; }

// The larger one; NaN if either is.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

__device__ __forceinline__ double combine(double a, double b) { return a + b; }
__device__ __forceinline__ float combine(float a, float b) { return larger(a, b); }

// The sum of doubles, or the largest of floats, over the CTA, in all threads. `parts` has WARPS of them.
template <class T>
__device__ __forceinline__ T reduce(T value, T* parts) {
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) value = combine(value, shuffle_xor(value, mask));
  if (lane_index() == 0) parts[warp_index()] = value;
  __syncthreads();
  value = parts[0];
#pragma unroll
  for (u32 warp = 1; warp < WARPS; warp++) value = combine(value, parts[warp]);
  return value;
}

struct Token {
  const u8* x;  // (columns,)
  const float* weight;
  float root;

  __device__ __forceinline__ float at(u32 column) const {
    if (QUANTISE_BF16) return bf16_low(reinterpret_cast<const u16*>(x)[column]);
    return reinterpret_cast<const float*>(x)[column];
  }

  __device__ __forceinline__ float normed(u32 column) const {
    if (QUANTISE_NORM == 0) return at(column);
    return rounded(rounded(at(column) * root) * weight[column]);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) ternary_quantise(const u8* x,          // (tokens, columns)
                                                                       const float* weight,  // (columns,)
                                                                       signed char* q,       // (tokens, columns)
                                                                       float* inverses,      // (tokens,)
                                                                       u32 columns, float eps) {
  double* sums = reinterpret_cast<double*>(dynamic_shared());  // (WARPS,)
  float* largest = reinterpret_cast<float*>(sums + WARPS);     // (WARPS,)
  const u64 first = static_cast<u64>(blockIdx.x) * columns;
  Token token{x + first * (QUANTISE_BF16 ? 2 : 4), weight, 1.0f};
  if (QUANTISE_NORM) {
    double squares = 0;
    for (u32 i = threadIdx.x; i < columns; i += THREADS) squares += static_cast<double>(token.at(i)) * token.at(i);
    const float mean = static_cast<float>(reduce(squares, sums) / columns);
    token.root = 1.0f / sqrtf(mean + eps);
  }
  float most = 0;
  for (u32 i = threadIdx.x; i < columns; i += THREADS) most = larger(most, fabsf(token.normed(i)));
  most = larger(LEAST, reduce(most, largest));
  const float inverse = 1.0f / most * 127.0f;  // in this order: so PyTorch divides a number by a tensor
  for (u32 i = threadIdx.x; i < columns; i += THREADS)
    q[first + i] = static_cast<signed char>(__float2int_rn(token.normed(i) * inverse));
  if (threadIdx.x == 0) inverses[blockIdx.x] = inverse;
}
