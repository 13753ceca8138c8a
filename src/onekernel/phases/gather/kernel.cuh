// The gather phase: the owner of hidden rows multiplies its part of the down rows of all neurons that fire by what those
// neurons came to, and adds that to its residual. Which ones fire is known before that, so the rows are on their way to the
// CTA while up rows are multiplied elsewhere.
//
// A warp takes the neurons of a run of row tiles of the gate, the same for every plan of a model; a neuron's part of a row
// is taken by neighbouring lanes, four hidden rows each. Sums go over the neurons in the order of their places.
#pragma once

#include "ptx/stream.cuh"
#include "tile/machine.cuh"

constexpr u32 LIST_ROOM = 64;   // neurons of a warp that are listed at once
constexpr u32 DOWN_LOADS = 4;   // parts of down rows that a lane has on their way at once
constexpr u32 PART_ROWS = 8;    // hidden rows of a part

// What a warp needs to know of the neurons.
struct Downs {
  u32 tile_rows, row_bytes, want;
  const u8* rows;     // (neurons, 2, row_bytes) from the CTA's part of the first down row on
  const u64* firing;  // (tiles): a bit for each neuron that fires
  const u64* inner;   // (neurons)
  u32* list;          // (LIST_ROOM): places, and then in their stead what their rows are multiplied by
};

// A lane takes two row tiles' bits; tiles that do not exist have none.
__device__ __forceinline__ bool take_firing(const Machine& m, const Downs& d, u32 tile, u32 last, u32& bits) {
  bits = 0;
  if (tile >= last) return true;
  const u32 tag = d.want;
  u64 first = 0, second = tile + 1 < last ? 0 : static_cast<u64>(tag) << 32;
  const bool ok = spin(m.watch, Wait::VALUE, static_cast<u32>(d.firing - m.launch.exchange) + tile, tag, [&](u64& seen) {
    if (first >> 32 != tag) first = load_relaxed_gpu(d.firing + tile);
    if (second >> 32 != tag) second = load_relaxed_gpu(d.firing + tile + 1);
    seen = first >> 32 != tag ? first >> 32 : second >> 32;
    return seen == tag;
  });
  bits = static_cast<u32>(first) | static_cast<u32>(second) << d.tile_rows;
  return ok;
}

// Four or eight hidden rows of a down row; with `rows_4` they lie at a multiple of 8 bytes only, and the last may be four.
__device__ __forceinline__ uint4 load_part(const u8* from, bool rows_4, bool whole) {
  if (!rows_4) return load_once(reinterpret_cast<const uint4*>(from));
  const uint2 low = load_once(reinterpret_cast<const uint2*>(from));
  const uint2 high = whole ? load_once(reinterpret_cast<const uint2*>(from) + 1) : make_uint2(0, 0);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// Waits for what the first `count` neurons of the list came to, and puts that in the list.
__device__ __forceinline__ bool take_inner(const Machine& m, const Downs& d, u32 count, u32 lane) {
  constexpr u32 EACH = LIST_ROOM / WARP;
  u32 place[EACH];
  u64 inner[EACH];
#pragma unroll
  for (u32 i = 0; i < EACH; i++) {
    const bool there = lane + i * WARP < count;
    place[i] = there ? d.list[lane + i * WARP] : 0;
    inner[i] = there ? 0 : static_cast<u64>(d.want) << 32;
  }
  __syncwarp();
  const bool ok = spin(m.watch, Wait::VALUE, static_cast<u32>(d.inner - m.launch.exchange) + place[0], d.want, [&](u64& seen) {
#pragma unroll
    for (u32 i = 0; i < EACH; i++)
      if (inner[i] >> 32 != d.want) inner[i] = load_relaxed_gpu(d.inner + place[i]);
    seen = d.want;
#pragma unroll
    for (u32 i = 0; i < EACH; i++)
      if (inner[i] >> 32 != d.want) seen = inner[i] >> 32;
    return seen == d.want;
  });
#pragma unroll
  for (u32 i = 0; i < EACH; i++)
    if (lane + i * WARP < count) d.list[lane + i * WARP] = static_cast<u32>(inner[i]);
  __syncwarp();
  return ok;
}

__device__ __forceinline__ bool gather_phase(Machine& m, const Task& task) {
  const bool rows_4 = task.flags & FLAG_ROWS_4;
  const u32 rows = task.count * (rows_4 ? 4 : 8), first_row = task.first * (rows_4 ? 4 : 8);
  const u32 octets = (rows + PART_ROWS - 1) / PART_ROWS, lane = lane_index(), warp = warp_index();
  float* const parts = m.shared.partial();  // (MK_WARPS, rows), then the warps' lists
  Downs d;
  d.tile_rows = task.stride;
  d.row_bytes = task.k_units * (UNIT_BYTES / d.tile_rows);
  d.want = m.tag_of(task.in_phase);
  d.rows = m.launch.weights + task.weights + d.row_bytes + first_row * 2;
  d.firing = m.launch.exchange + task.in_word;
  d.inner = m.launch.exchange + m.header.inner_word;
  d.list = reinterpret_cast<u32*>(parts + MK_WARPS * rows) + warp * LIST_ROOM;
  const u32 tiles = m.header.neuron_tiles, share = (tiles + 2 * MK_WARPS - 1) / (2 * MK_WARPS) * 2;
  const u32 last = min((warp + 1) * share, tiles);
  // Neighbouring lanes take neighbouring rows of one neuron; the lanes that are left take further neurons.
  u32 lanes = 1;
  while (lanes < octets && lanes < WARP / 2) lanes *= 2;
  const u32 step = WARP / lanes, slot = lane / lanes, room = min(step * DOWN_LOADS, LIST_ROOM);
  bool ok = true;
#pragma unroll 1
  for (u32 first = 0; first < octets; first += lanes) {
    const u32 octet = first + lane % lanes;
    float sum[PART_ROWS] = {};
#pragma unroll 1
    for (u32 tile = warp * share; tile < last; tile += 2 * WARP) {
      u32 bits;
      ok = take_firing(m, d, tile + 2 * lane, last, bits) && ok;
      if (!ok) bits = 0;
      __syncwarp();
      u32 before = __popc(bits);  // of neurons that fire, in this lane and those before
#pragma unroll
      for (u32 distance = 1; distance < WARP; distance *= 2) {
        const u32 other = shuffle_index(before, lane - distance);
        if (lane >= distance) before += other;
      }
      const u32 all = shuffle_index(before, WARP - 1);
      before -= __popc(bits);
#pragma unroll 1
      for (u32 listed = 0; listed < all; listed += room) {
        const u32 count = min(all - listed, room);
        u32 at = before - listed;
#pragma unroll 1
        for (u32 left = bits; left != 0; left &= left - 1, at++)
          if (at < room) d.list[at] = (tile + 2 * lane) * d.tile_rows + __ffs(left) - 1;
        __syncwarp();
        uint4 row[DOWN_LOADS];
#pragma unroll
        for (u32 i = 0; i < DOWN_LOADS; i++) {
          row[i] = make_uint4(0, 0, 0, 0);
          if (slot + i * step < count && octet < octets)
            row[i] = load_part(d.rows + static_cast<u64>(d.list[slot + i * step]) * (2 * d.row_bytes) + octet * (2 * PART_ROWS), rows_4,
                               octet * PART_ROWS + 4 < rows);
        }
        ok = take_inner(m, d, count, lane) && ok;
#pragma unroll
        for (u32 i = 0; i < DOWN_LOADS; i++) {
          if (slot + i * step >= count) continue;
          const float value = __uint_as_float(d.list[slot + i * step]);
          const u32 pairs[4] = {row[i].x, row[i].y, row[i].z, row[i].w};
#pragma unroll
          for (u32 p = 0; p < 4; p++) {
            sum[2 * p] += value * bf16_low(pairs[p]);
            sum[2 * p + 1] += value * bf16_high(pairs[p]);
          }
        }
        __syncwarp();
      }
    }
    // Half of the lanes go on with four of the rows, the others with the other four.
    float4 quad;
    float* const own = &quad.x;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const bool high = lane >= WARP / 2;
      own[i] = (high ? sum[4 + i] : sum[i]) + shuffle_xor(high ? sum[i] : sum[4 + i], WARP / 2);
    }
#pragma unroll 1
    for (u32 mask = lanes; mask < WARP / 2; mask *= 2) {
#pragma unroll
      for (u32 i = 0; i < 4; i++) own[i] += shuffle_xor(own[i], mask);
    }
    const u32 row = octet * PART_ROWS + lane / (WARP / 2) * 4;
    if (lane % (WARP / 2) < lanes && row < rows) *reinterpret_cast<float4*>(parts + warp * rows + row) = quad;
  }
  const bool all = m.meet(ok);
  for (Mark part : {Mark::TAKEN, Mark::MULTIPLIED, Mark::MET}) m.mark(part);  // all at once: there is no product
  if (!all) return false;
  // A warp for four rows, a lane for each warp's part of them.
#pragma unroll 1
  for (u32 row = 4 * warp; row < rows; row += 4 * MK_WARPS) {
    float4 sum{};
    if (lane < MK_WARPS) sum = *reinterpret_cast<const float4*>(parts + lane * rows + row);
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
      sum.x += shuffle_xor(sum.x, mask);
      sum.y += shuffle_xor(sum.y, mask);
      sum.z += shuffle_xor(sum.z, mask);
      sum.w += shuffle_xor(sum.w, mask);
    }
    if (lane > 1) continue;
    float2* residual = reinterpret_cast<float2*>(m.shared.residual()) + row / 2 + lane;
    *residual = make_float2(residual->x + (lane == 0 ? sum.x : sum.z), residual->y + (lane == 0 ? sum.y : sum.w));
    m.give_word(task.out_word + (first_row + row) / 2 + lane, bf16_pair(residual->x, residual->y));
  }
  return true;
}
