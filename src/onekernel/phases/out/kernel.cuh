// The out phase, and down, which differs only in its inputs: residual += W x + bias, by the rows' one owner.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ void residual_rows(const Machine& m, const Task& task, const Rows& rows) {
  const u32 own = rows.first - task.first * (task.flags & FLAG_ROWS_4 ? 4 : 8);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows.count / 2 * SEQUENCES; i += CONSUMERS) {
    const u32 sequence = SEQUENCES == 1 ? 0 : i / (rows.count / 2), row = (i - sequence * (rows.count / 2)) * 2;
    const float2 sum = add_bias(m, task, sum_parts(m, rows, sequence, row), rows.first + row);
    float2* residual = reinterpret_cast<float2*>(m.shared.residual() + sequence * m.header.max_hidden_rows + own + row);
    const float2 value = make_float2(residual->x + sum.x, residual->y + sum.y);
    *residual = value;
    m.give_word(task.out_word + sequence * m.header.x_words + (rows.first + row) / 2, bf16_pair(value.x, value.y));
  }
}
