// A phase's product with quantised weights: take the inputs, make them int8, multiply, sum, scale.
//
// Norm and quantisation are no phase of their own: every CTA does them for itself, on values that it takes anyway. What
// comes out is bound by the contract of onekernel/phases/ternary.py: whole-number sums, which no order changes, a sum of
// squares in an order that the number of columns decides, and a few roundings in a stated order, so a phase gives the
// reference's bits for the inputs that it took (bf16, as all that travels), whatever the plan.
//
// Ternary units (weights/ternary/tensor_core.py) are 16 rows x 128 columns, four products of one AND each, as in
// ternary/decode.cu. Units of an int8 head are 16 rows x 32 columns: a product whose columns are the coarse and the fine
// values of the inputs. Two neighbouring units of a stage belong to a warp, pair i of a task to warp i % MK_WARPS. Inputs
// stand in the order of their columns, a byte each; the lanes of a warp read them together, so that all columns of B are
// the same.
//
// What a phase costs is what lies one behind the other between its inputs and its results, not its bytes. A thread keeps its
// inputs in registers until they are int8; all that it waits for the others for is the largest. The last warp takes none:
// it makes the root of the norm meanwhile.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/divide.cuh"
#include "ptx/dp4a.cuh"
#include "ptx/whole.cuh"
#include "tile/product.cuh"

constexpr float LEAST = 1e-5f, LEAST_BEFORE_NORM = 1e-10f;  // of the largest absolute input
constexpr float FINE = 254.0f;  // steps of a fine value in one coarse: half a step either way fits an int8
constexpr u32 GROUPS = SCALE_GROUP == 0 ? 1 : 128 / (SCALE_GROUP + (SCALE_GROUP == 0));  // scales of a unit's row
template <bool INT8>
constexpr bool GROUPED = !INT8 && SCALE_GROUP > 0;
constexpr u32 LAST_WARP = MK_WARPS - 1, TAKERS = LAST_WARP * WARP;  // no other warp has fewer units
constexpr u32 MOST_FOURS = 4, ROUND_FOURS = MOST_FOURS * TAKERS;    // of values that a thread, and all, keep in registers

// What quantised products keep in shared memory, behind the residual; onekernel/plan/shared.py lays it out the same way.
// Where it begins is computed anew at each use: 96 registers a thread have no room for it.
struct Quantised {
  static constexpr u32 TOTALS = round_up(MK_WARPS, 4) * 4, DIVISOR = 2 * TOTALS, SQUARES = DIVISOR + 16;
  u32 at, inputs;

  __device__ __forceinline__ explicit Quantised(const Machine& m) : at(m.shared.rest_at()), inputs(m.header.max_inputs) {}

  // (MK_WARPS): of absolute values.
  __device__ __forceinline__ float* largest() const { return Shared::at<float>(at); }
  // (MK_WARPS): of int8 values.
  __device__ __forceinline__ i32* totals() const { return Shared::at<i32>(at + TOTALS); }
  // What scales are divided by.
  __device__ __forceinline__ float* divisor() const { return Shared::at<float>(at + DIVISOR); }
  // (max_inputs / 4): sums of four.
  __device__ __forceinline__ float* squares() const { return Shared::at<float>(at + SQUARES); }
  // (max_inputs / 64): of int8 values that share a scale.
  __device__ __forceinline__ i32* groups() const { return Shared::at<i32>(at + SQUARES + inputs); }
  // Weighted inputs of all rounds but the last.
  __device__ __forceinline__ float4* earlier() const {
    return Shared::at<float4>(at + SQUARES + inputs + round_up(inputs / 16, 16));
  }
  // With groups: (row tiles, scales of a row, QUANTISED_ROWS).
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(earlier() + (inputs / 4 - 1) / ROUND_FOURS * ROUND_FOURS);
  }
};

// How many values the norm before a product is over.
__device__ __forceinline__ u32 norm_count(const Machine& m, const Task& task) {
  const Kind kind = static_cast<Kind>(task.kind);
  return kind == Kind::OUT ? task.inputs : kind == Kind::DOWN ? m.header.inner : m.header.hidden;
}

// After the takers' first meeting: 127 / the largest absolute input.
__device__ __forceinline__ float inverse_of(const Quantised& own) {
  const float most = own.largest()[min(lane_index(), LAST_WARP - 1)];
  // The largest float is the largest integer too, and of those NaN is larger than infinity.
  const float largest = __uint_as_float(warp_max(__float_as_uint(most)));
  return __fmul_rn(divide_ordinary(1.0f, largest), 127.0f);  // in this order: so PyTorch divides a number by a tensor
}

// One warp, after that meeting: the root mean square of a task's inputs.
__device__ __forceinline__ float root_of(const Machine& m, const Quantised& own, const Task& task, u32 fours) {
  const float share = divide_ordinary(1.0f, static_cast<float>(norm_count(m, task)));
  float4 sums = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (u32 i = lane_index(); i < fours / 4; i += WARP) {
    const float4 v = reinterpret_cast<const float4*>(own.squares())[i];
    sums = make_float4(sums.x + v.x, sums.y + v.y, sums.z + v.z, sums.w + v.w);
  }
  float sum = (sums.x + sums.z) + (sums.y + sums.w);
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return root_ordinary(__fadd_rn(__fmul_rn(sum, share), m.header.eps));
}

// Makes four weighted inputs int8, the four of place `four`, and returns them.
template <bool INT8>
__device__ __forceinline__ u32 put_bytes(const Machine& m, u32 four, const float4& t, float inverse) {
  const float4 y = make_float4(__fmul_rn(t.x, inverse), __fmul_rn(t.y, inverse), __fmul_rn(t.z, inverse), __fmul_rn(t.w, inverse));
  const float4 whole = make_float4(to_whole(y.x), to_whole(y.y), to_whole(y.z), to_whole(y.w));
  const u32 bytes = four_bytes(whole.x, whole.y, whole.z, whole.w);
  u32* x = m.shared.x() + four;
  x[0] = bytes;
  if (INT8) {
    // What the rounding of y left, in fine steps.
    const auto rest = [](float y, float whole) { return to_whole(__fmul_rn(y - (whole - WHOLE_STEPS), FINE)); };
    x[m.header.max_inputs / 4] = four_bytes(rest(y.x, whole.x), rest(y.y, whole.y), rest(y.z, whole.z), rest(y.w, whole.w));
  }
  return bytes;
}

// The sums of int8 values that share a scale: a warp has 128 neighbouring ones, of fours `first` to `first` + 31.
__device__ __forceinline__ void put_groups(const Quantised& own, u32 bytes, u32 four) {
  i32 sum = add_bytes(bytes, 0);
#pragma unroll
  for (u32 mask = 1; mask < SCALE_GROUP / 4; mask *= 2) sum += shuffle_xor(sum, mask);
  if (four % (SCALE_GROUP / 4 + (SCALE_GROUP == 0)) == 0) own.groups()[four * 4 / (SCALE_GROUP + (SCALE_GROUP == 0))] = sum;
}

// Takes the task's inputs, WIDTH fours a thread at once, and leaves their int8 values in shared.x(): (columns of whole
// units), then the fine ones if it is the head. All consumers call it. What else there is to say of the inputs is in
// `Quantised` after the next meeting, but for `total`, the sum of a warp's int8 values.
template <bool INT8, u32 WIDTH>
__device__ __forceinline__ bool take_fours(const Machine& m, const Task& task, u32 columns, bool ok, i32& total) {
  const Quantised own(m);
  const u32 fours = task.inputs / 4, all = columns / 4;
  const bool normed = task.norm != 0;
  if (warp_index() == LAST_WARP) {
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    float divisor = inverse_of(own);
    if (normed) divisor = __fmul_rn(divisor, root_of(m, own, task, all));
    if (lane_index() == 0) *own.divisor() = divisor;
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    return ok;
  }
  const float4* const norm = reinterpret_cast<const float4*>(m.launch.constants + task.norm - 1);
  float4 t[WIDTH] = {};
  float most = normed ? LEAST_BEFORE_NORM : LEAST;
  // Without a norm its weights are 1, which changes no value, and nobody asks for the squares.
  const auto take = [&](u32 first) {
    const u32 count = first < fours ? (fours - first + TAKERS - 1) / TAKERS : 0;
    Pair taken[WIDTH] = {};
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) {
      t[i] = make_float4(1, 1, 1, 1);
      if (normed && i < count) t[i] = norm[first + i * TAKERS];
    }
    const u32 word = task.in_word + 2 * first;
    ok = ok && wait_pairs<TAKERS>(m.watch, reinterpret_cast<const Pair*>(m.launch.exchange + word), count,
                                  m.tag_of(task.in_phase), word, taken);
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) {
      const u32 a = static_cast<u32>(taken[i].first), b = static_cast<u32>(taken[i].second);
      const float4 v = make_float4(bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b));
      t[i] = make_float4(v.x * t[i].x, v.y * t[i].y, v.z * t[i].z, v.w * t[i].w);
      most = larger(larger(larger(most, fabsf(t[i].x)), fabsf(t[i].y)), larger(fabsf(t[i].z), fabsf(t[i].w)));
      // Squares of bf16 values are whole floats.
      if (first + i * TAKERS < all) own.squares()[first + i * TAKERS] = (v.x * v.x + v.z * v.z) + (v.y * v.y + v.w * v.w);
    }
  };
  u32 first = threadIdx.x;
#pragma unroll 1
  for (;; first += ROUND_FOURS) {
    take(first);
    if (WIDTH < MOST_FOURS || first - threadIdx.x + ROUND_FOURS >= all) break;
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++) own.earlier()[first + i * TAKERS] = t[i];
  }
  const u32 largest = warp_max(__float_as_uint(most));
  if (lane_index() == 0) own.largest()[warp_index()] = __uint_as_float(largest);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const float inverse = inverse_of(own);
  if (WIDTH == MOST_FOURS) {
#pragma unroll 1
    for (u32 four = threadIdx.x; four < first; four += TAKERS) {
      const u32 bytes = put_bytes<INT8>(m, four, own.earlier()[four], inverse);
      total = add_bytes(bytes, total);
      if (GROUPED<INT8>) put_groups(own, bytes, four);
    }
  }
  // Whole units: all lanes of a warp go on together. Columns behind the inputs have weight 0 and are 0 themselves.
  u32 bytes[WIDTH] = {};
#pragma unroll
  for (u32 i = 0; i < WIDTH; i++)
    if (first + i * TAKERS < all) bytes[i] = put_bytes<INT8>(m, first + i * TAKERS, t[i], inverse);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
#pragma unroll
  for (u32 i = 0; i < WIDTH; i++) {
    total = add_bytes(bytes[i], total);
    if (GROUPED<INT8> && first + i * TAKERS < all) put_groups(own, bytes[i], first + i * TAKERS);
  }
  if (!INT8 && SCALE_GROUP == 0) total = static_cast<i32>(warp_sum(static_cast<u32>(total)));
  return ok;
}

// One warp's units of a stage.
struct Units {
  uint4 first, second;
};

// Takes the ring's current stage. A part of it that the task does not have is what was there before.
__device__ __forceinline__ Units take_units(Machine& m, bool& ok) {
  ok = ok && m.take(m.at);
  const u32 place = warp_index() * (2 * QUANTISED_UNIT_BYTES) + lane_index() * static_cast<u32>(sizeof(uint4));
  const uint4* unit = reinterpret_cast<const uint4*>(m.ring.stages + m.at.stage * STAGE_BYTES + place);
  const Units units{unit[0], unit[WARP]};
  m.ring.free(m.at, ok);
  m.at.advance();
  return units;
}

// Warps that have units of a row tile, up to all; with an odd number of units the first pair or the last is half of one.
__device__ __forceinline__ u32 pairs_of(u32 k_units) { return min((k_units + 1) / 2, static_cast<u32>(MK_WARPS)); }

// One warp's sums.
template <bool INT8>
struct Multiplier {
  static constexpr u32 PARTS = INT8 ? 1 : 4, CHUNKS = INT8 ? 2 : 8;  // CHUNKS: 16 bytes of inputs for a unit
  // Of product i, times 4^i: rows lane / 4 and + 8, columns lane % 4 * 2 and + 1. Without groups they go on from row tile to
  // row tile, and a tile's are what was added since the one before: zeros would be as many instructions as a unit.
  i32 sums[PARTS][4] = {}, before[4] = {};
  const u8* x;  // this lane's inputs of unit 0 of a row tile
  i32* parts;   // where its sums of the run's first row tile belong
  u32 lane = kept(lane_index());
  u32 k = 2 * warp_index();  // of the warp's next unit in its row tile; from k_units on, of one in a later row tile
  u32 tile = 0;              // that row tile's first row
  u32 k_units, rows;

  __device__ __forceinline__ Multiplier(const Machine& m, u32 row_tiles, u32 units)
      : k_units(units), rows(row_tiles * QUANTISED_ROWS) {
    const u8* own = reinterpret_cast<const u8*>(m.shared.x());
    x = INT8 ? own + (lane / 4 % 2) * m.header.max_inputs + lane % 4 * 8 : own + lane % 4 * 16;
    parts = reinterpret_cast<i32*>(m.shared.partial()) + lane / 4;
  }

  __device__ __forceinline__ void settle() {
#pragma unroll 1
    for (; k >= k_units; k -= k_units) tile += QUANTISED_ROWS;
  }

  // Adds COUNT neighbouring units of one row tile; the warp's next unit comes `step` units after the first.
  template <u32 COUNT>
  __device__ __forceinline__ void add(const uint4 (&w)[COUNT], u32 step) {
    settle();
    const u32 here = k;
    const u8* at = x + here * (CHUNKS * 16);
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
      if (INT8) {
        const uint2 b = *reinterpret_cast<const uint2*>(at + i * 32);
        mma_s8s8(sums[0], w[i].x, w[i].y, w[i].z, w[i].w, b.x, b.y);
        continue;
      }
      const uint4 b[2] = {*reinterpret_cast<const uint4*>(at + i * 128), *reinterpret_cast<const uint4*>(at + i * 128 + 64)};
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const u32 even = 0x03030303u << 4 * half, odd = even << 2;
        mma_u8s8(sums[2 * half % PARTS], w[i].x & even, w[i].y & even, w[i].z & even, w[i].w & even, b[half].x, b[half].y);
        mma_u8s8(sums[(2 * half + 1) % PARTS], w[i].x & odd, w[i].y & odd, w[i].z & odd, w[i].w & odd, b[half].z, b[half].w);
      }
      if (!GROUPED<INT8>) continue;
#pragma unroll
      for (u32 group = 0; group < GROUPS; group++)
        put(parts + ((here + i) * GROUPS + group) * rows + tile, group * PARTS / GROUPS, PARTS / GROUPS);
    }
    k += step;
    if (GROUPED<INT8> || k < k_units) return;
    const u32 odd_start = COUNT == 2 ? 0 : tile / QUANTISED_ROWS & k_units & 1;  // the tile begins with a pair's second unit
    put(parts + tile * MK_WARPS + (here + odd_start) / 2 % MK_WARPS * QUANTISED_ROWS, 0, PARTS);
  }

  // Stores what `count` products from `first` on have added. The codes' offset is still in it.
  __device__ __forceinline__ void put(i32* to, u32 first, u32 count) {
    i32 sum[4] = {};
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
      if (i < first || i >= first + count) continue;
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        sum[c] += sums[i][c] >> 2 * i;
        if (GROUPED<INT8>) sums[i][c] = 0;
      }
    }
    if (!GROUPED<INT8>) {
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        const i32 now = sum[c];
        sum[c] -= before[c];
        before[c] = now;
      }
    }
    if (lane % 4 != 0) return;
    to[0] = sum[0];
    to[8] = sum[2];
    if (!INT8) return;
    to += rows * MK_WARPS;
    to[0] = sum[1];
    to[8] = sum[3];
  }
};

// Multiplies `row_tiles` row tiles, which start at a whole stage, of which the warp has `units` already, and leaves
// whole-number sums in shared.partial: (row tiles, MK_WARPS, QUANTISED_ROWS), for int8 twice, the second time of fine values,
// or with groups (groups, rows). A meeting follows. See Walk for `ok`.
template <bool INT8>
__device__ __forceinline__ bool multiply_quantised(Machine& m, u32 row_tiles, u32 k_units, Units units, bool ok) {
  Multiplier<INT8> own(m, row_tiles, k_units);
  i32 left = static_cast<i32>(row_tiles * k_units);  // units, from the current stage on
#pragma unroll 1
  for (;; left -= static_cast<i32>(QUANTISED_STAGE_UNITS)) {
    const i32 own_left = left - static_cast<i32>(2 * warp_index());
    if (k_units % 2 == 0) {
      if (own_left > 0) own.template add<2>({units.first, units.second}, QUANTISED_STAGE_UNITS);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < 2 && static_cast<i32>(i) < own_left; i++) {
        own.template add<1>({units.first}, i == 0 ? 1 : QUANTISED_STAGE_UNITS - 1);
        units.first = units.second;
      }
    }
    if (left <= static_cast<i32>(QUANTISED_STAGE_UNITS)) return ok;
    units = take_units(m, ok);
  }
}

// Where the scales of a run's rows are, without groups: one of a row, with them as in Quantised::scales().
__device__ __forceinline__ const float* scales_of(const Machine& m, const Task& task, u32 row, u32 of_row) {
  const Header& header = m.header;
  const Kind kind = static_cast<Kind>(task.kind);
  u32 from = header.qkv_scales + (HEAD_INT8 && kind == Kind::HEAD ? header.layers : task.layer) * header.layer_scales;
  if (kind == Kind::OUT) from += header.out_scales - header.qkv_scales;
  if (kind == Kind::GATE_UP) from += header.gate_up_scales - header.qkv_scales;
  if (kind == Kind::DOWN) from += header.down_scales - header.qkv_scales;
  return m.launch.constants + from + row * of_row;
}

// The result of a row of a run, without bias; `scale`: that of the row, if it has only one.
template <bool INT8>
__device__ __forceinline__ float quantised_row(const Machine& m, const Rows& rows, u32 row, float scale) {
  const Quantised own(m);
  const i32* parts = reinterpret_cast<const i32*>(m.shared.partial());
  const float divisor = *own.divisor();
  if (GROUPED<INT8>) {
    const u32 groups = rows.k_units * GROUPS;
    const float* scales = own.scales() + row / QUANTISED_ROWS * groups * QUANTISED_ROWS + row % QUANTISED_ROWS;
    float total = 0;
#pragma unroll 4
    for (u32 group = 0; group < groups; group++) {
      const i32 sum = parts[group * rows.count + row] - own.groups()[group];
      // Each term is rounded by itself: with a fused one, bits would depend on the compiler.
      total += __fmul_rn(static_cast<float>(sum), scales[group * QUANTISED_ROWS]);
    }
    return divide_ordinary(total, divisor);
  }
  const u32 count = pairs_of(rows.k_units);
  // Every second row tile begins with its second part: the same part of neighbouring ones lies in the same banks.
  const u32 tile = row / QUANTISED_ROWS, swap = tile % 2;
  const i32* of_row = parts + tile * (QUANTISED_ROWS * MK_WARPS) + row % QUANTISED_ROWS;
  const auto sum_of = [&](const i32* from) {
    i32 sum = 0;
#pragma unroll
    for (u32 part = 0; part < MK_WARPS; part++)
      if ((part ^ swap) < count) sum += from[(part ^ swap) * QUANTISED_ROWS];
    return sum;
  };
  float value;
  if (INT8) {
    value = static_cast<float>(sum_of(of_row)) +
            divide_ordinary(static_cast<float>(sum_of(of_row + rows.count * MK_WARPS)), FINE);
  } else {
    i32 offset = 0;
#pragma unroll
    for (u32 w = 0; w < MK_WARPS; w += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(own.totals() + w);
      offset += static_cast<i32>((v.x + v.y) + (v.z + v.w));
    }
    value = static_cast<float>(sum_of(of_row) - offset);
  }
  const float factor = divide_ordinary(scale, divisor);
  return __fmul_rn(value, factor);  // by itself: fused with what it is added to, it would have bits of its own
}

// With groups: starts copying the scales of a run's rows; they are there after this thread's wait and a meeting.
__device__ __forceinline__ void fetch_scales(const Machine& m, const Task& task, const Rows& rows) {
  const u32 of_row = rows.k_units * GROUPS;
  const float4* source = reinterpret_cast<const float4*>(scales_of(m, task, rows.first, of_row));
  float4* to = reinterpret_cast<float4*>(Quantised(m).scales());
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows.count * of_row / 4; i += CONSUMERS) async_copy(to + i, source + i, true);
  async_copies_commit();
}

// Without groups: the scales of a run's rows. A thread has that of its row from the beginning; rows that it has CONSUMERS
// after that are rare.
template <bool INT8>
struct RowScale {
  float own = 0;

  __device__ __forceinline__ RowScale(const Machine& m, const Task& task, const Rows& rows) {
    if (!GROUPED<INT8> && threadIdx.x < rows.count) own = *scales_of(m, task, rows.first + threadIdx.x, 1);
  }

  __device__ __forceinline__ float of(const Machine& m, const Task& task, const Rows& rows, u32 row) const {
    return GROUPED<INT8> || row == threadIdx.x ? own : *scales_of(m, task, rows.first + row, 1);
  }
};

// Calls give(row, value) for each pair of neighbouring rows; see for_row_pairs.
template <class Give>
__device__ __forceinline__ void for_quantised_pairs(const Machine& m, const Task& task, const Rows& rows, const RowScale<false>& scale, Give give) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i - lane_index() < rows.count; i += CONSUMERS) {
    const u32 row = min(i, rows.count);
    float value = 0;
    if (row < rows.count) value = quantised_row<false>(m, rows, row, scale.of(m, task, rows, row));
    float2 pair = make_float2(value, shuffle_down(value, 1));
    const bool even = row < rows.count && row % 2 == 0;
    if (even) pair = add_bias(m, task, pair, rows.first + row);
    give(even ? row : rows.count, pair);
  }
}

// Takes, multiplies, and calls finish(rows, scale), by all consumers, for each run of rows. The layers' phases are one run
// each; an int8 head takes as many row tiles at once as end with a stage and have room for their sums.
template <bool INT8, class Finish>
__device__ __forceinline__ bool quantised_product(Machine& m, const Task& task, Finish finish) {
  u32 run = task.count;
  if (INT8) {
    u32 step = 1;
    while (step * task.k_units % QUANTISED_STAGE_UNITS != 0) step++;
    run = m.header.max_rows / 2 / QUANTISED_ROWS / step * step;
  }
  bool ok = true;
  i32 total = 0;
#pragma unroll 1
  for (u32 tile = 0; tile < task.count; tile += run) {
    const u32 tiles = min(run, task.count - tile);
    const Rows rows{(task.first + tile) * QUANTISED_ROWS, tiles * QUANTISED_ROWS, task.k_units, 4};
    // Weights and scales are there, as a rule, before the inputs are.
    const Units units = take_units(m, ok);
    const RowScale<INT8> scale(m, task, rows);
    if (tile == 0) {
      const u32 columns = task.k_units * (INT8 ? 32 : 128);
      ok = columns <= 2 * 4 * TAKERS ? take_fours<INT8, 2>(m, task, columns, ok, total)
                                     : take_fours<INT8, MOST_FOURS>(m, task, columns, ok, total);
      m.mark(Mark::TAKEN);
    }
    if (GROUPED<INT8>) fetch_scales(m, task, rows);
    ok = multiply_quantised<INT8>(m, tiles, task.k_units, units, ok);
    m.mark(Mark::MULTIPLIED);
    if (GROUPED<INT8>) {
      async_copies_wait<0>();
    } else if (!INT8 && lane_index() == 0) {
      Quantised(m).totals()[warp_index()] = total;
    }
    if (!m.meet(ok)) return false;
    m.mark(Mark::MET);
    finish(rows, scale);
    if (tile + run < task.count) barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  return true;
}
