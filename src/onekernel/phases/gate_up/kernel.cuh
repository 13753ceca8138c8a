// The gate_up phase: activation(gate) * up. A tile holds some gate rows, then the same up rows, so one CTA has both.
#pragma once

#include "tile/product.cuh"

__device__ __forceinline__ float activate(float gate) {
  if (MK_ACTIVATION == 0) return __fdividef(gate, 1.0f + __expf(-gate));
  const float positive = max(gate, 0.0f);
  return MK_ACTIVATION == 1 ? positive : positive * positive;
}

__device__ __forceinline__ void gate_up_rows(const Machine& m, const Task& task, const Rows& rows, u32 sequence, u32 row,
                                             float2 value) {
  const u32 half = 1u << rows.tile_shift >> 1;
  const float2 up = make_float2(shuffle_down(value.x, half), shuffle_down(value.y, half));
  if (row == rows.count || row & half) return;
  const u32 output = (row >> rows.tile_shift) * half + row % half;
  m.give_word(task.out_word + sequence * m.header.inner_words + (rows.first / 2 + output) / 2,
              bf16_pair(activate(value.x) * up.x, activate(value.y) * up.y));
}
