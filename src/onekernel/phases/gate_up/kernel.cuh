// The gate_up phase: activation(gate) * up. A tile holds some gate rows, then the same up rows, so one CTA has both.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ float activate(float gate) {
  if (MK_ACTIVATION == 0) return __fdividef(gate, 1.0f + __expf(-gate));
  const float positive = max(gate, 0.0f);
  return MK_ACTIVATION == 1 ? positive : positive * positive;
}

__device__ __forceinline__ void gate_up_rows(const Machine& m, const Task& task, const Rows& rows) {
  const u32 half = task.flags & FLAG_ROWS_4 ? 2 : 4;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows.count / 4 * SEQUENCES; i += CONSUMERS) {
    const u32 sequence = SEQUENCES == 1 ? 0 : i / (rows.count / 4), output = (i - sequence * (rows.count / 4)) * 2;
    const u32 row = output / half * 2 * half + output % half;  // of the first of two gate rows
    const float factor = norm_factor(m, task, sequence);
    float2 gate = sum_parts(m, rows, sequence, row);
    float2 up = sum_parts(m, rows, sequence, row + half);
    gate = add_bias(m, task, make_float2(gate.x * factor, gate.y * factor), rows.first + row);
    up = add_bias(m, task, make_float2(up.x * factor, up.y * factor), rows.first + row + half);
    const u32 word = task.out_word + sequence * m.header.inner_words + (rows.first / 2 + output) / 2;
    m.give_word(word, bf16_pair(activate(gate.x) * up.x, activate(gate.y) * up.y));
  }
}
