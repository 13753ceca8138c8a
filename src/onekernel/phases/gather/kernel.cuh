// The gather phase: the owner of hidden rows adds up what the CTAs' neurons gave them, in one order, and adds that to the
// residual. A CTA none of whose neurons fired has given zeros, early, so waiting for its words costs nothing.
#pragma once

#include "tile/machine.cuh"

// A lane's part of the sums of two rows: givers `first`, `first` + `step` and so on.
__device__ __forceinline__ bool add_given(const Machine& m, const Task& task, u32 row, u32 first, u32 step, float2& sum) {
  constexpr u32 UNROLL = 2;  // pairs that a thread waits for at once: a round trip each would cost more
  const u32 want = m.tag_of(task.in_phase), rows = m.header.hidden_rows;
#pragma unroll 1
  for (u32 giver = first; giver < m.header.ctas; giver += step * UNROLL) {
    const u64* words = m.launch.exchange + task.in_word + row;
    Pair taken[UNROLL];
    const bool ok = spin(m.watch, Wait::VALUE, task.in_word + giver * rows + row, want, [&](u64& seen) {
#pragma unroll
      for (u32 i = 0; i < UNROLL; i++)
        if (giver + i * step < m.header.ctas)
          taken[i] = load_relaxed_gpu(reinterpret_cast<const Pair*>(words + (giver + i * step) * rows));
      seen = want;
#pragma unroll
      for (u32 i = 0; i < UNROLL; i++) {
        if (giver + i * step >= m.header.ctas) continue;
        if (taken[i].first >> 32 != want) seen = taken[i].first >> 32;
        if (taken[i].second >> 32 != want) seen = taken[i].second >> 32;
      }
      return seen == want;
    });
    if (!ok) return false;
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++) {
      if (giver + i * step >= m.header.ctas) continue;
      sum.x += __uint_as_float(static_cast<u32>(taken[i].first));
      sum.y += __uint_as_float(static_cast<u32>(taken[i].second));
    }
  }
  return true;
}

__device__ __forceinline__ bool gather_phase(Machine& m, const Task& task) {
  const u32 tile_rows = task.flags & FLAG_ROWS_4 ? 4 : 8, rows = task.count * tile_rows, pairs = rows / 2;
  const u32 thread = threadIdx.x, lane = lane_index(), warp = warp_index();
  float* const parts = m.shared.partial();  // (MK_WARPS, rows)
  // Neighbouring lanes take neighbouring rows of one giver, a whole line where there are 16 rows; the lanes that are left
  // take further givers, and so do the other warps.
  u32 lanes = 1;
  while (lanes < pairs && lanes < WARP) lanes *= 2;
  const u32 givers = WARP / lanes;
  bool ok = true;
#pragma unroll 1
  for (u32 first = 0; first < pairs; first += lanes) {
    const u32 pair = first + lane % lanes;
    float2 sum = make_float2(0, 0);
    if (pair < pairs)
      ok = ok && add_given(m, task, task.first * tile_rows + 2 * pair, warp * givers + lane / lanes, MK_WARPS * givers, sum);
    __syncwarp();
#pragma unroll 1
    for (u32 mask = lanes; mask < WARP; mask *= 2) {
      sum.x += shuffle_xor(sum.x, mask);
      sum.y += shuffle_xor(sum.y, mask);
    }
    if (lane < lanes && pair < pairs) *reinterpret_cast<float2*>(parts + warp * rows + 2 * pair) = sum;
  }
  const bool all = m.meet(ok);
  for (Mark part : {Mark::TAKEN, Mark::MULTIPLIED, Mark::MET}) m.mark(part);  // all at once: there is no product
  if (!all) return false;
#pragma unroll 1
  for (u32 pair = thread; pair < pairs; pair += CONSUMERS) {
    float2* residual = reinterpret_cast<float2*>(m.shared.residual()) + pair;
    float2 sum = make_float2(0, 0);
#pragma unroll 4
    for (u32 w = 0; w < MK_WARPS; w++) {
      const float2 part = *reinterpret_cast<const float2*>(parts + w * rows + 2 * pair);
      sum.x += part.x;
      sum.y += part.y;
    }
    sum = make_float2(residual->x + sum.x, residual->y + sum.y);
    *residual = sum;
    m.give_word(task.out_word + task.first * tile_rows / 2 + pair, bf16_pair(sum.x, sum.y));
  }
  return true;
}
