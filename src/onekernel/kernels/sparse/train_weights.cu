// The gradients of a neuron's three weight rows, a CTA each: sums over the tokens that it was active for, in their order.
// The products that decide about the factors are made again, from the same x and grad_out that are added up.
//
// Constants: also TRAIN_FLOAT (gradients in float32; else bf16).
#include "sparse/training.cuh"

// A row of a gradient; float32 never rounds.
__device__ __forceinline__ void store_gradient(Sums& sums, uint4* matrix, u32 row) {
  if constexpr (TRAIN_FLOAT) {
#pragma unroll
    for (u32 i = 0; i < TRAIN_VECTORS; i++) {
      if (column_of(i) >= TRAIN_COLUMNS) continue;
      float4* to = reinterpret_cast<float4*>(matrix) + (static_cast<u64>(row) * TRAIN_COLUMNS + column_of(i)) * 2;
      const float* v = sums.part[i];
      to[0] = make_float4(v[0], v[1], v[2], v[3]);
      to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  } else {
    sums.store(matrix, row, false);
  }
}

extern "C" __global__ void __launch_bounds__(TRAIN_THREADS)
    train_weights(const uint4* x,         // (tokens, hidden) bf16
                  const uint4* grad_out,  // (tokens, hidden) bf16
                  const float* l1,        // (1,): the gradient of the sum of all |h|
                  const u32* by_neuron,   // (neurons, blocks), see train_transpose.cu
                  const uint4* gate,      // (neurons, hidden) bf16; without a gate not looked at
                  const uint4* up,        // (neurons, hidden) bf16
                  const uint4* down,      // (neurons, hidden) bf16
                  uint4* gate_grad,       // (neurons, hidden); without a gate not written
                  uint4* up_grad,         // (neurons, hidden)
                  uint4* down_grad,       // (neurons, hidden)
                  u32 neurons, u32 blocks) {
  constexpr u32 X = 0, GRAD = 1;
  const u32 neuron = blockIdx.x;
  Gather<2> gather(dynamic_shared());
  gather.matrices[X] = x;
  gather.matrices[GRAD] = grad_out;
  const Row own_up = load_row(up, neuron), own_down = load_row(down, neuron);
  Row own_gate = own_up;
  if constexpr (TRAIN_GATED) own_gate = load_row(gate, neuron);
  const float penalty = *l1;
  Sums gate_sums, up_sums, down_sums;
  gate_sums.clear();
  up_sums.clear();
  down_sums.clear();
  for (u32 begin = 0; begin < blocks; begin += TRAIN_THREADS) {
    const u32 count = gather.collect(by_neuron + static_cast<u64>(neuron) * blocks, begin, blocks);
    gather.issue(0, 0, count);
    for (u32 entry = 0, slot = 0; entry < count; entry += TRAIN_BATCH, slot ^= 1) {
      gather.issue(slot ^ 1, entry + TRAIN_BATCH, count);
      async_copies_wait<1>();
      float v[TRAIN_SUMS] = {};
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++)
#pragma unroll
        for (u32 i = 0; i < TRAIN_VECTORS; i++) {
          const uint4 token = *gather.stage(slot, j, X, i);
          if constexpr (TRAIN_GATED) v[3 * j] += dot(token, own_gate.part[i]);
          v[3 * j + 1] += dot(token, own_up.part[i]);
          v[3 * j + 2] += dot(*gather.stage(slot, j, GRAD, i), own_down.part[i]);
        }
      const float dots = gather.sum(v, slot);
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++) {
        const Active active = differentiate(dots, j, penalty);
        if (entry + j >= count) continue;
#pragma unroll
        for (u32 i = 0; i < TRAIN_VECTORS; i++) {
          const uint4 token = *gather.stage(slot, j, X, i);
          if constexpr (TRAIN_GATED) gate_sums.add(i, active.gate, token);
          up_sums.add(i, active.up, token);
          down_sums.add(i, active.inner, *gather.stage(slot, j, GRAD, i));
        }
      }
    }
    async_copies_wait<0>();
  }
  if constexpr (TRAIN_GATED) store_gradient(gate_sums, gate_grad, neuron);
  store_gradient(up_sums, up_grad, neuron);
  store_gradient(down_sums, down_grad, neuron);
}
