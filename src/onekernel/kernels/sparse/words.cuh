// TwELL words (weights/twell.py): the column in the low half, the bf16 value in the high half.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/platform.cuh"
#include "ptx/shuffle.cuh"

// Running sums since the totals were made; whoever wants those of one call takes differences.
enum Total : u32 { PACKED, OVERFLOWED, GATHERED, SLICED };

__device__ __forceinline__ u32 word_column(u32 word) { return word & 0xffffu; }
__device__ __forceinline__ float word_value(u32 word) { return bf16_high(word); }
__device__ __forceinline__ u32 word_of(u32 column, float value) { return bf16_pair(0.0f, value) | column; }

// ReLU, or squared ReLU, of a value that was kept.
template <bool SQUARE>
__device__ __forceinline__ float activate(float kept) {
  return SQUARE ? kept * kept : kept;
}

// Above zero, or NaN of either sign, which ReLU passes on.
__device__ __forceinline__ bool kept(u32 bits) {
  const u32 size = bits & 0x7fffu;
  return size > 0x7f80u || (size != 0 && bits < 0x8000u);
}

// Value i of eight in one vector, as 16 bits.
__device__ __forceinline__ u32 half_of(uint4 v, u32 i) {
  const u32 word = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
  return i % 2 ? word >> 16 : word & 0xffffu;
}

// Eight products of two vectors, added up in pairs.
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  float sum = bf16_low(a.x) * bf16_low(b.x) + bf16_high(a.x) * bf16_high(b.x);
  sum += bf16_low(a.y) * bf16_low(b.y) + bf16_high(a.y) * bf16_high(b.y);
  sum += bf16_low(a.z) * bf16_low(b.z) + bf16_high(a.z) * bf16_high(b.z);
  return sum + (bf16_low(a.w) * bf16_low(b.w) + bf16_high(a.w) * bf16_high(b.w));
}

__device__ __forceinline__ u32 kept_mask(const uint4& v) {
  u32 mask = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) mask |= static_cast<u32>(kept(half_of(v, i))) << i;
  return mask;
}

// The sum over the lanes before this one, and over all in `total`.
__device__ __forceinline__ u32 warp_prefix(u32 value, u32& total) {
  u32 sum = value;
#pragma unroll
  for (u32 distance = 1; distance < WARP; distance *= 2) {
    const u32 before = shuffle_index(sum, lane_index() - distance);
    if (lane_index() >= distance) sum += before;
  }
  total = shuffle_index(sum, WARP - 1);
  return sum - value;
}
