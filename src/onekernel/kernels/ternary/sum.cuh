// What all kernels of ternary weights agree on: the unit, where activations stand in shared memory, the order of sums.
//
// Without groups a result is float(sum) * (the row's scale / the token's inverse), with an exact integer sum; inverse is
// what the activations were multiplied by when they were made int8. With groups the terms float(sum of a group) * its
// scale, each product rounded first, are added in the order of K, and the total is divided by inverse. So a result has
// the same bits on every path: onekernel/phases/ternary.py is the authority.
//
// Constants: TERNARY_GROUP (0, 64 or 128), TERNARY_BF16.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/dp4a.cuh"
#include "ptx/platform.cuh"

constexpr u32 STRIP_ROWS = 16, UNIT_COLUMNS = 128, UNIT_BYTES = STRIP_ROWS * UNIT_COLUMNS / 4;
constexpr u32 GROUP = TERNARY_GROUP, GROUPS = GROUP == 0 ? 0 : UNIT_COLUMNS / (GROUP + (GROUP == 0));  // of a unit
constexpr u32 X_PIECES = UNIT_COLUMNS / 16;  // 16-byte pieces of a token's activations in a unit

template <u32 GROUP_COLUMNS>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<0> {
  using Type = i32;
};
using Sum = SumOf<GROUP>::Type;

// Where piece `piece` of a token's 128 activations of a unit stands. Tokens are 128 bytes apart, all the banks; odd ones
// have their halves swapped, so that a quarter of a warp, two tokens x four pieces of a half, meets each bank once.
__device__ __forceinline__ u32 x_piece_at(u32 token, u32 piece) {
  return token * UNIT_COLUMNS + (piece ^ token % 2 * 4) * 16;
}

// A group's term. The product is rounded by itself: with a fused one, bits would depend on the compiler.
__device__ __forceinline__ float term(i32 sum, float scale) { return __fmul_rn(static_cast<float>(sum), scale); }

// What a sum is multiplied with, or with groups divided by.
__device__ __forceinline__ float factor_of(float scale, float inverse) { return GROUP == 0 ? scale / inverse : inverse; }
__device__ __forceinline__ float scaled(i32 sum, float factor) { return static_cast<float>(sum) * factor; }
__device__ __forceinline__ float scaled(float sum, float factor) { return sum / factor; }

__device__ __forceinline__ void store_result(void* out, u64 at, float result) {
  if (TERNARY_BF16)
    static_cast<u16*>(out)[at] = static_cast<u16>(bf16_pair(result, 0));
  else
    static_cast<float*>(out)[at] = result;
}

// Two results side by side, the second of which may lie past the end of its row.
__device__ __forceinline__ void store_results(void* out, u64 at, float first, float second, bool both) {
  if (!both || at % 2 == 1) {  // with an odd number of rows every other token's begin at an odd place
    store_result(out, at, first);
    if (both) store_result(out, at + 1, second);
  } else if (TERNARY_BF16) {
    static_cast<u32*>(out)[at / 2] = bf16_pair(first, second);
  } else {
    static_cast<float2*>(out)[at / 2] = make_float2(first, second);
  }
}
