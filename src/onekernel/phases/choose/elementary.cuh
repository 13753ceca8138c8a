// Exponential, logarithm and Gumbel noise: elementary.py, operation by operation. A product that is added to something is
// written __fmul_rn, so that the compiler does not fuse the two; then every machine gives the same bits.
#pragma once

#include "ptx/divide.cuh"

constexpr u32 SQRT_HALF_BITS = 0x3F3504F3;
constexpr float LN2 = 0.6931471805599453, LN2_HIGH = 0.693145751953125, LN2_LOW = 0.6931471805599453 - 0.693145751953125;
constexpr float WEIGHT_ONE = 1099511627776.0f;  // 2**40

// A number as 2**exponent * (1 + fraction).
struct Split {
  i32 exponent;
  float fraction;
};

__device__ __forceinline__ Split split(float x) {
  const i32 bits = static_cast<i32>(__float_as_uint(x));
  const i32 exponent = (bits - static_cast<i32>(SQRT_HALF_BITS)) >> 23;
  return {exponent, __uint_as_float(static_cast<u32>(bits) - (static_cast<u32>(exponent) << 23)) - 1.0f};
}

__device__ __forceinline__ float log_of(const Split& x) {
  const float s = divide_ordinary(x.fraction, x.fraction + 2.0f), z = __fmul_rn(s, s);
  float series = __fmul_rn(z, static_cast<float>(2.0 / 9.0));
  series = __fmul_rn(series + static_cast<float>(2.0 / 7.0), z);
  series = __fmul_rn(series + static_cast<float>(2.0 / 5.0), z);
  series = __fmul_rn(series + static_cast<float>(2.0 / 3.0), z);
  return __fmul_rn(series + 2.0f, s) + __fmul_rn(static_cast<float>(x.exponent), LN2);
}

__device__ __forceinline__ float exp_of(float x) {
  const float least = max(x, -87.0f);
  const i32 k = __float2int_rn(__fmul_rn(least, static_cast<float>(1.0 / 0.6931471805599453)));
  const float whole = static_cast<float>(k);
  const float r = (least - __fmul_rn(whole, LN2_HIGH)) - __fmul_rn(whole, LN2_LOW);
  float power = static_cast<float>(1.0 / 720.0);
  power = __fmul_rn(power, r) + static_cast<float>(1.0 / 120.0);
  power = __fmul_rn(power, r) + static_cast<float>(1.0 / 24.0);
  power = __fmul_rn(power, r) + static_cast<float>(1.0 / 6.0);
  power = __fmul_rn(power, r) + 0.5f;
  power = __fmul_rn(power, r) + 1.0f;
  power = __fmul_rn(power, r) + 1.0f;
  return x < -87.0f ? 0.0f : __uint_as_float(__float_as_uint(power) + (static_cast<u32>(k) << 23));
}

// The probability of a score beside that of the highest one, in whole multiples of 2**-40: sums do not depend on order.
__device__ __forceinline__ u64 weight_of(float score, float top) {
  return static_cast<u64>(__fmul_rn(exp_of(score - top), WEIGHT_ONE));
}

// Standard Gumbel noise of a random word.
__device__ __forceinline__ float gumbel(u32 word) {
  const float v = min(__fmul_rn(static_cast<float>(2 * static_cast<u64>(word) + 1), 1.0f / 8589934592.0f), 1.0f - 1.0f / 16777216.0f);
  const Split rest = split(1.0f - v);
  const float exponential = -log_of({rest.exponent, rest.exponent == 0 ? -v : rest.fraction});
  return -log_of(split(exponential));
}
