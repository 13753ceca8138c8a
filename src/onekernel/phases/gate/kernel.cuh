// The gate phase of a sparse feed-forward: the gate's product, then the up and down rows of those of the CTA's neurons
// that fire; what they give to all hidden rows is published. No other CTA is waited for in between.
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

// A neuron that fires: where its rows lie, and what its down row is multiplied by: its gate, and later all of it.
struct Firing {
  u32 offset;
  float inner;
};

constexpr u32 BLOCK = 4;   // down rows that a thread loads at once; the list of firing neurons is padded to whole blocks
constexpr u32 EARLY = 8;  // neurons of a warp's 64 that are asked for at once: more would delay the weights of others

// The CTA's neurons, in the order of their places.
struct Neurons {
  u32 count, row_bytes;  // of an up or a down row
  const u8* rows;        // (count, 2, row_bytes) bf16: up in the order of shared.x(), then down
  float* gates;          // (count)
  Firing* firing;        // (count, and the padding)

  __device__ __forceinline__ Neurons(const Machine& m, const Task& task) {
    const bool rows_4 = task.flags & FLAG_ROWS_4;
    const u32 tile_rows = rows_4 ? 4 : 8;
    count = task.count * tile_rows;
    row_bytes = task.k_units * (UNIT_BYTES / tile_rows);
    const u64 behind = static_cast<u64>(m.header.neuron_tiles - task.first) * task.k_units * UNIT_BYTES;
    rows = m.launch.weights + task.weights + behind + static_cast<u64>(task.first * tile_rows) * (2 * row_bytes);
    gates = Shared::at<float>(forget(m.shared.rest_at()));
    firing = reinterpret_cast<Firing*>(gates + count);
  }
};

// Keeps the gates of two neurons, by whole warps, and asks for the rows of those that fire if they are few. A gate that
// is not a number fires: what is wrong must be seen.
__device__ __forceinline__ void gate_rows(const Machine& m, const Task& task, const Rows& rows, u32 row, float2 value) {
  const Neurons neurons(m, task);
  const bool there = row < rows.count, first = there && !(value.x <= 0), second = there && !(value.y <= 0);
  const u32 own = rows.first - (task.first << rows.tile_shift) + row;
  if (there) *reinterpret_cast<float2*>(neurons.gates + own) = value;
  if (__popc(warp_ballot(first)) + __popc(warp_ballot(second)) > EARLY) return;
  const u8* mine = neurons.rows + own * 2 * neurons.row_bytes;
  if (first) bulk_prefetch(mine, 2 * neurons.row_bytes);
  if (second) bulk_prefetch(mine + 2 * neurons.row_bytes, 2 * neurons.row_bytes);
}

// Lists the neurons that fire, in order, and returns their number to all threads. Padding repeats the last of them.
__device__ __forceinline__ u32 list_firing(const Neurons& neurons, u32 thread) {
  const u32 lane = thread % WARP, warp = thread / WARP;
  u32 firing = 0, last = 0;
#pragma unroll 1
  for (u32 first = 0; first < neurons.count; first += WARP) {
    const float gate = first + lane < neurons.count ? neurons.gates[first + lane] : 0;
    const u32 mask = warp_ballot(!(gate <= 0));
    if (mask >> lane & 1 && first / WARP % MK_WARPS == warp)
      neurons.firing[firing + __popc(mask & ((1u << lane) - 1))] = Firing{(first + lane) * 2 * neurons.row_bytes, gate};
    firing += __popc(mask);
    if (mask != 0) last = first + WARP - 1 - __clz(mask);
  }
  if (thread < round_up(firing, BLOCK) - firing) neurons.firing[firing + thread] = Firing{last * 2 * neurons.row_bytes, 0};
  return firing;
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

// A warp asks for a row of one neuron.
__device__ __forceinline__ void ask_for(const u8* row, u32 bytes, u32 lane) {
  if (lane == 0) bulk_prefetch(row, bytes);
}

// After the product. A warp multiplies whole up rows; a thread adds up four columns of all down rows, in the order of the
// neurons. Sixteen neurons ahead of the one at work the rows are on their way to L2.
__device__ __forceinline__ void firing_rows(const Machine& m, const Task& task) {
  const Neurons neurons(m, task);
  const u32 thread = forget(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // all gates are there
  const u32 firing = list_firing(neurons, thread);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // so is the list
  if (firing > EARLY && warp < firing) ask_for(neurons.rows + neurons.firing[warp].offset, 2 * neurons.row_bytes, lane);
  const float factor = norm_factor(m, task, 0);
#pragma unroll 1
  for (u32 i = warp; i < firing; i += MK_WARPS) {
    Firing* const it = neurons.firing + i;
    if (i + MK_WARPS < firing) ask_for(neurons.rows + it[MK_WARPS].offset, neurons.row_bytes, lane);
    const float up = dot_up(m, neurons, it->offset, lane) * factor, gate = it->inner;
    __syncwarp();
    if (lane == 0) it->inner = bf16_low(bf16_pair((MK_ACTIVATION == 1 ? gate : gate * gate) * up, 0));
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll 1
  for (u32 column = 4 * thread; column < m.header.hidden_rows; column += 4 * CONSUMERS) {
    const u8* down = neurons.rows + neurons.row_bytes + column * 2;
    float4 sum{};
#pragma unroll 1
    for (u32 first = 0; first < firing; first += BLOCK) {
      const u32 ahead = first + MK_WARPS + warp;
      if (warp < BLOCK && ahead < firing) ask_for(neurons.rows + neurons.firing[ahead].offset + neurons.row_bytes, neurons.row_bytes, lane);
      const Firing* const block = neurons.firing + first;
      uint2 values[BLOCK];
#pragma unroll
      for (u32 i = 0; i < BLOCK; i++) values[i] = load_once(reinterpret_cast<const uint2*>(down + block[i].offset));
#pragma unroll
      for (u32 i = 0; i < BLOCK; i++) {
        sum.x += block[i].inner * bf16_low(values[i].x);
        sum.y += block[i].inner * bf16_high(values[i].x);
        sum.z += block[i].inner * bf16_low(values[i].y);
        sum.w += block[i].inner * bf16_high(values[i].y);
      }
    }
    Pair* const to = reinterpret_cast<Pair*>(m.launch.exchange + task.out_word + blockIdx.x * m.header.hidden_rows + column);
    store_relaxed_gpu(to, Pair{tagged(__float_as_uint(sum.x), m.tag()), tagged(__float_as_uint(sum.y), m.tag())});
    store_relaxed_gpu(to + 1, Pair{tagged(__float_as_uint(sum.z), m.tag()), tagged(__float_as_uint(sum.w), m.tag())});
  }
  if (thread == CONSUMERS - 1) add_relaxed_gpu(m.launch.exchange + m.header.counts_word + task.layer, firing);
}
