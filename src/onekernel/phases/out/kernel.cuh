// The out phase, and down, which differs only in its inputs: residual += W x + bias, by the rows' one owner.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ void residual_rows(const Machine& m, const Task& task, const Rows& rows, u32 sequence, u32 row,
                                              float2 value) {
  if (row == rows.count) return;
  const u32 own = rows.first - (task.first << rows.tile_shift) + row;
  float2* residual = reinterpret_cast<float2*>(m.shared.residual() + sequence * m.header.max_hidden_rows + own);
  value = make_float2(residual->x + value.x, residual->y + value.y);
  *residual = value;
  m.give_word(task.out_word + sequence * m.header.x_words + (rows.first + row) / 2, bf16_pair(value.x, value.y));
}
