// Root-mean-square norm and quantisation to int8 of one token a CTA: q = round(t * inverse), half to even, with inverse =
// 127 / max|t|. Without a norm t = x. With float input t = x * weight, and inverse is then multiplied with the root mean
// square of x; its sum and the order of operations are those of onekernel/phases/ternary.py. With bf16 input the normalised
// value and its product with the weight, t, are each rounded to bf16, as models in that type round them.
//
// Root and divisions are the exactly rounded ones. A value that is no number makes inverse NaN or 0, and so every product
// with this token no number either.
//
// Constants: QUANTISE_THREADS, QUANTISE_BF16 (1: x is bf16, 0: float), QUANTISE_NORM (0: without one), QUANTISE_ORDERED (1:
// as wgmma.cu takes them, with zeros behind the columns, which are fours of floats, and their sum).
#include "ptx/convert.cuh"
#include "ptx/dp4a.cuh"
#include "ptx/platform.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/whole.cuh"
#include "ternary/order.cuh"

constexpr u32 THREADS = QUANTISE_THREADS, WARPS = THREADS / WARP;
constexpr u32 FOUR = 4, PLACES = WARP * FOUR;  // that sums of fours are added up to
constexpr bool ROOT_APART = QUANTISE_NORM && !QUANTISE_BF16;
constexpr float LEAST = ROOT_APART ? 1e-10f : 1e-5f;  // of max|t|: as the models do, but before the root

__device__ __forceinline__ float rounded(float value) { return QUANTISE_BF16 ? bf16_low(bf16_pair(value, 0)) : value; }

__device__ __forceinline__ float four_in_halves(float a, float b, float c, float d) {
  return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}

// The sum of all lanes' values in halves, in all lanes.
__device__ __forceinline__ float in_halves(float value) {
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) value = __fadd_rn(value, shuffle_xor(value, mask));
  return value;
}

// The largest of the CTA's values, in all threads. `parts` has WARPS of them.
__device__ __forceinline__ float largest_of(float value, float* parts) {
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  if (lane_index() == 0) parts[warp_index()] = value;
  __syncthreads();
  value = parts[0];
#pragma unroll
  for (u32 warp = 1; warp < WARPS; warp++) value = larger(value, parts[warp]);
  return value;
}

struct Token {
  const u8* x;  // (columns,)
  const float* weight;
  u32 columns;
  float root;  // 1 / root mean square; with float input it is not part of a value

  __device__ __forceinline__ float at(u32 column) const {
    if (QUANTISE_BF16) return bf16_low(reinterpret_cast<const u16*>(x)[column]);
    return reinterpret_cast<const float*>(x)[column];
  }

  __device__ __forceinline__ float normed(u32 column) const {
    if (QUANTISE_NORM == 0) return at(column);
    if (ROOT_APART) return at(column) * weight[column];
    return rounded(rounded(at(column) * root) * weight[column]);
  }

  // Four at once, of float input.
  __device__ __forceinline__ float4 normed_four(u32 column) const {
    float4 v = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(x) + column);
    if (QUANTISE_NORM == 0) return v;
    const float4 w = *reinterpret_cast<const float4*>(weight + column);
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
  }

  __device__ __forceinline__ float square(u32 column) const {
    const float value = column < columns ? at(column) : 0.0f;
    return __fmul_rn(value, value);
  }

  __device__ __forceinline__ float square_of_four(u32 column) const {
    if (!QUANTISE_ORDERED) return four_in_halves(square(column), square(column + 1), square(column + 2), square(column + 3));
    const float4 v = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(x) + column);
    return four_in_halves(__fmul_rn(v.x, v.x), __fmul_rn(v.y, v.y), __fmul_rn(v.z, v.z), __fmul_rn(v.w, v.w));
  }

  // The sum of squares of the CTA's token, in all threads. `parts` has PLACES of them.
  __device__ __forceinline__ float squares(float* parts) const {
    for (u32 place = threadIdx.x; place < PLACES; place += THREADS) {
      float sum = 0;
#pragma unroll 4
      for (u32 i = place * FOUR; i < columns; i += PLACES * FOUR)
        sum = __fadd_rn(sum, square_of_four(i));
      parts[place] = sum;
    }
    __syncthreads();
    const float* own = parts + lane_index() * FOUR;
    return in_halves(four_in_halves(own[0], own[1], own[2], own[3]));
  }
};

__device__ __forceinline__ u32 int8_of(float value, float inverse) { return __float2int_rn(value * inverse) & 0xff; }

// Four neighbours as int8.
__device__ __forceinline__ u32 word_of(float4 v, float inverse) {
  return int8_of(v.x, inverse) | int8_of(v.y, inverse) << 8 | int8_of(v.z, inverse) << 16 | int8_of(v.w, inverse) << 24;
}

// Stores the CTA's token in the order of the codes, and returns the sum of what it stored, in thread 0. parts: (WARPS,)
__device__ __forceinline__ i32 store_ordered(const Token& token, u32* q, u32 width, float inverse, i32* parts) {
  i32 sum = 0;
  for (u32 word = threadIdx.x; word < width / FOUR; word += THREADS) {
    const u32 bytes = word < token.columns / FOUR ? word_of(token.normed_four(word * FOUR), inverse) : 0;
    sum = add_bytes(bytes, sum);
    q[place_of_word(word)] = bytes;
  }
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (lane_index() == 0) parts[warp_index()] = sum;
  __syncthreads();
  for (u32 warp = 1; warp < WARPS; warp++) sum += parts[warp];
  return sum;
}

static_assert(!QUANTISE_ORDERED || !QUANTISE_BF16, "fours of floats");

extern "C" __global__ void __launch_bounds__(THREADS) ternary_quantise(const u8* x,          // (tokens, columns)
                                                                       const float* weight,  // (columns,)
                                                                       u8* q,                // (tokens, width)
                                                                       float* inverses,      // (tokens,)
                                                                       i32* q_sums,          // (tokens,), if ordered
                                                                       u32 columns, u32 width, float eps) {
  float* sums = reinterpret_cast<float*>(dynamic_shared());  // (PLACES,)
  float* largest = sums + PLACES;                            // (WARPS,)
  const u64 first = static_cast<u64>(blockIdx.x) * columns;
  Token token{x + first * (QUANTISE_BF16 ? 2 : 4), weight, columns, 1.0f};
  float root = 1.0f;
  if (QUANTISE_NORM) {
    root = sqrtf(__fadd_rn(__fmul_rn(token.squares(sums), 1.0f / static_cast<float>(columns)), eps));
    token.root = 1.0f / root;
  }
  float most = 0;
  if (QUANTISE_ORDERED) {
    for (u32 i = threadIdx.x * FOUR; i < columns; i += THREADS * FOUR) {
      const float4 v = token.normed_four(i);
      most = larger(larger(larger(most, fabsf(v.x)), fabsf(v.y)), larger(fabsf(v.z), fabsf(v.w)));
    }
  } else {
    for (u32 i = threadIdx.x; i < columns; i += THREADS) most = larger(most, fabsf(token.normed(i)));
  }
  most = larger(LEAST, largest_of(most, largest));
  const float inverse = 1.0f / most * 127.0f;  // in this order: so PyTorch divides a number by a tensor
  u8* to = q + static_cast<u64>(blockIdx.x) * width;
  if (QUANTISE_ORDERED) {
    // All have read the sums of squares: a barrier of the largest lies between.
    const i32 sum = store_ordered(token, reinterpret_cast<u32*>(to), width, inverse, reinterpret_cast<i32*>(sums));
    if (threadIdx.x == 0) q_sums[blockIdx.x] = sum;
  } else {
    for (u32 i = threadIdx.x; i < columns; i += THREADS) to[i] = static_cast<u8>(int8_of(token.normed(i), inverse));
  }
  if (threadIdx.x == 0) inverses[blockIdx.x] = ROOT_APART ? inverse * root : inverse;
}
