// Division rounded to nearest, without the subroutine that the compiler calls for very large and very small numbers: a call
// takes registers away from whatever is alive around it.
#pragma once

#include "ptx/platform.cuh"

// a / b of ordinary numbers, the compiler's own steps: a is 0 or, as b, of a size between 2**-60 and 2**60.
__device__ __forceinline__ float divide_ordinary(float a, float b) {
#ifdef __CUDACC__
  float about;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(b));
  const float inverse = __fmaf_rn(__fmaf_rn(-b, about, 1.0f), about, about);
  float quotient = __fmul_rn(a, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
  return __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
#else
  return a / b;
#endif
}

// a / b for any b but 0 and infinities. Ordinary numbers take a quarter of the time. Every float is an ordinary double; the
// quotient of two lies at least 2**-49 of its size from where rounding to float changes, and 2**-52 is how far the one below
// may be from it.
__device__ __forceinline__ float divide(float a, float b) {
#ifdef __CUDACC__
  // Of a size from 2**-60 to below 2**60.
  const auto ordinary = [](float value) { return (__float_as_uint(value) >> 23 & 0xff) - 67u < 120u; };
  if (ordinary(a) && ordinary(b)) return divide_ordinary(a, b);
  const double divisor = b;
  double inverse;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(divisor));
  inverse = __fma_rn(__fma_rn(-divisor, inverse, 1.0), inverse, inverse);
  inverse = __fma_rn(__fma_rn(-divisor, inverse, 1.0), inverse, inverse);
  const double quotient = __dmul_rn(a, inverse);
  const float rounded = static_cast<float>(quotient);
  if (rounded - rounded != 0) return rounded;  // infinite: no remainder
  return static_cast<float>(__fma_rn(__fma_rn(-divisor, quotient, a), inverse, quotient));
#else
  return a / b;
#endif
}

// The square root rounded to nearest, the compiler's own steps, of a number between 2**-60 and 2**60.
__device__ __forceinline__ float root_ordinary(float a) {
#ifdef __CUDACC__
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a));
  const float root = __fmul_rn(a, inverse);
  return __fmaf_rn(__fmaf_rn(-root, root, a), __fmul_rn(inverse, 0.5f), root);
#else
  return __builtin_sqrtf(a);
#endif
}
