// The qkv phase: normalised residual times W, plus bias; raw queries, keys and values are published as bf16.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ void qkv_rows(const Machine& m, const Task& task, const Rows& rows, u32 sequence, u32 row,
                                         float2 value) {
  if (row == rows.count) return;
  m.give_word(task.out_word + sequence * m.header.qkv_words + (rows.first + row) / 2, bf16_pair(value.x, value.y));
}
