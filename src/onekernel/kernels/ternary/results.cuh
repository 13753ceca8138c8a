// What a product of many tokens does with its results: keep them, add them to what is there, or make activation(gate) * up
// of a matrix whose strips are eight rows of gate and then the same eight of up. Each operation is rounded by itself, as in
// onekernel/phases. Only float results are added or gated.
#pragma once

#include "ternary/sum.cuh"

enum Result : u32 { STORE, ADD, SILU, RELU, RELU2 };

constexpr u32 HALF_STRIP = STRIP_ROWS / 2;

__device__ __forceinline__ bool is_gated(u32 result) { return !TERNARY_BF16 && result >= SILU; }

__device__ __forceinline__ float gated(u32 result, float gate, float up) {
  if (result == SILU) return gate / (1.0f + __expf(-gate)) * up;
  const float positive = max(gate, 0.0f);
  return (result == RELU ? positive : positive * positive) * up;
}

// Two results side by side, the second of which may lie past the end of its row; what is at `at` with ADD is added.
__device__ __forceinline__ void put_results(u32 result, void* out, u64 at, float first, float second, bool both) {
  if (!TERNARY_BF16 && result == ADD) {
    const float* before = static_cast<const float*>(out) + at;
    first = __fadd_rn(before[0], first);
    if (both) second = __fadd_rn(before[1], second);
  }
  store_results(out, at, first, second, both);
}
