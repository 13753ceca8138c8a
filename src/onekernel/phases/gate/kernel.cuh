// The gate phase of a sparse feed-forward: the gate's product, then the up rows of those of the CTA's neurons that fire.
// Which ones those are is published as soon as it is known, so that the owners of hidden rows can ask for down rows while
// up rows are multiplied; then what each down row is to be multiplied by.
//
// The gate comes through the ring like any product. The rows do not: which ones are needed is known only after the gate,
// and in the ring they would hold up the weights of the phases behind them. They are asked for one neuron at a time, a
// prefetch to L2 that needs no registers, of which there are few; warps then load them from there, while the ring fills on.
#pragma once

#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/opaque.cuh"
#include "ptx/stream.cuh"
#include "tile/product.cuh"

constexpr u32 EARLY = 8;  // neurons of a warp's 32 that are asked for at once: more would delay the weights of others

// The CTA's neurons, in the order of their places.
struct Neurons {
  u32 first, count, row_bytes;  // row_bytes: of an up or a down row
  const u8* rows;               // (count, 2, row_bytes) bf16: up in the order of shared.x(), then down
  float* gates;                 // (count)

  __device__ __forceinline__ Neurons(const Machine& m, const Task& task) {
    const bool rows_4 = task.flags & FLAG_ROWS_4;
    const u32 tile_rows = rows_4 ? 4 : 8;
    first = task.first * tile_rows;
    count = task.count * tile_rows;
    row_bytes = task.k_units * (UNIT_BYTES / tile_rows);
    const u64 behind = static_cast<u64>(m.header.neuron_tiles - task.first) * task.k_units * UNIT_BYTES;
    rows = m.launch.weights + task.weights + behind + static_cast<u64>(first) * (2 * row_bytes);
    gates = Shared::at<float>(forget(m.shared.rest_at()));
  }
};

// Keeps the gates of two neurons, by whole warps, publishes which of a tile fire, a bit each, and asks for the rows of those
// that do if they are few. A gate that is not a number fires: what is wrong must be seen.
__device__ __forceinline__ void gate_rows(const Machine& m, const Task& task, const Rows& rows, u32 row, float2 value) {
  const Neurons neurons(m, task);
  const bool there = row < rows.count, first = there && !(value.x <= 0), second = there && !(value.y <= 0);
  const u32 tile_rows = 1u << rows.tile_shift, own = rows.first - neurons.first + row;
  const u32 firing = warp_ballot(first) | warp_ballot(second) << 1;  // pairs begin at even lanes
  if (there && row % tile_rows == 0)
    m.give_word(task.out_word + ((rows.first + row) >> rows.tile_shift), firing >> lane_index() & ((1u << tile_rows) - 1));
  if (there) *reinterpret_cast<float2*>(neurons.gates + own) = value;
  if (__popc(firing) > EARLY) return;
  const u8* mine = neurons.rows + own * 2 * neurons.row_bytes;
  if (first) bulk_prefetch(mine, 2 * neurons.row_bytes);
  if (second) bulk_prefetch(mine + 2 * neurons.row_bytes, 2 * neurons.row_bytes);
}

// One warp: an up row times the inputs; all lanes get the result.
__device__ __forceinline__ float dot_up(const Machine& m, const Neurons& neurons, u32 offset, u32 lane) {
  constexpr u32 LOADS = 8;  // on their way at once
  const u8* row = neurons.rows + offset + lane * 16;
  const u32 last = neurons.row_bytes / 16 - 1;
  float even = 0, odd = 0;
#pragma unroll 1
  for (u32 first = lane; first <= last; first += WARP * LOADS, row += WARP * LOADS * 16) {
    uint4 w[LOADS];
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      w[i] = make_uint4(0, 0, 0, 0);
      if (first + i * WARP <= last) w[i] = load_once(reinterpret_cast<const uint4*>(row) + i * WARP);
    }
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const uint4 v = reinterpret_cast<const uint4*>(m.shared.x())[min(first + i * WARP, last)];
      even += bf16_low(w[i].x) * bf16_low(v.x) + bf16_low(w[i].y) * bf16_low(v.y);
      odd += bf16_high(w[i].x) * bf16_high(v.x) + bf16_high(w[i].y) * bf16_high(v.y);
      even += bf16_low(w[i].z) * bf16_low(v.z) + bf16_low(w[i].w) * bf16_low(v.w);
      odd += bf16_high(w[i].z) * bf16_high(v.z) + bf16_high(w[i].w) * bf16_high(v.w);
    }
  }
  float dot = even + odd;
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) dot += shuffle_xor(dot, mask);
  return dot;
}

// After the product. Of the neurons that fire, in order, each warp takes one in turn, and publishes what the neuron's down
// row is multiplied by. Every warp finds its own among all gates: a list would cost a meeting.
__device__ __forceinline__ void firing_rows(const Machine& m, const Task& task) {
  const Neurons neurons(m, task);
  const u32 thread = forget(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // all gates are there
  const float factor = norm_factor(m, task, 0);
  u32 firing = 0;
#pragma unroll 1
  for (u32 first = 0; first < neurons.count; first += WARP) {
    const float gate = first + lane < neurons.count ? neurons.gates[first + lane] : 0;
    const bool fires = !(gate <= 0);
    const u32 all = warp_ballot(fires), rank = firing + __popc(all & ((1u << lane) - 1));
    firing += __popc(all);
#pragma unroll 1
    for (u32 mine = warp_ballot(fires && rank % MK_WARPS == warp); mine != 0; mine &= mine - 1) {
      const u32 at = __ffs(mine) - 1, offset = (first + at) * 2 * neurons.row_bytes;
      if (__popc(all) > EARLY && lane == 0) bulk_prefetch(neurons.rows + offset + neurons.row_bytes, neurons.row_bytes);
      const float up = dot_up(m, neurons, offset, lane) * factor, own = shuffle_index(gate, at);
      if (lane == 0)
        m.give_word(m.header.inner_word + neurons.first + first + at,
                    __float_as_uint(bf16_low(bf16_pair((MK_ACTIVATION == 1 ? own : own * own) * up, 0))));
    }
  }
  if (thread == CONSUMERS - 1) add_relaxed_gpu(m.launch.exchange + m.header.counts_word + task.layer, firing);
}
