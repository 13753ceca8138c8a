// The qkv phase: normalised residual times W, plus bias; raw queries, keys and values are published as bf16.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ void qkv_rows(const Machine& m, const Task& task, const Rows& rows) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows.count / 2 * SEQUENCES; i += CONSUMERS) {
    const u32 sequence = SEQUENCES == 1 ? 0 : i / (rows.count / 2), row = (i - sequence * (rows.count / 2)) * 2;
    const float factor = norm_factor(m, task, sequence);
    float2 sum = sum_parts(m, rows, sequence, row);
    sum = add_bias(m, task, make_float2(sum.x * factor, sum.y * factor), rows.first + row);
    m.give_word(task.out_word + sequence * m.header.qkv_words + (rows.first + row) / 2, bf16_pair(sum.x, sum.y));
  }
}
