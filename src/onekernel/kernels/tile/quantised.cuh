// A phase's product with quantised weights: take the inputs, normalise them, make them int8, multiply, sum, scale.
//
// Norm and quantisation are no phase of their own: every CTA does them for itself, on values that it takes anyway. What
// comes out is bound by the contract of onekernel/phases/ternary.py: whole-number sums, which no order changes, and a few
// roundings in a stated order, so a phase gives the reference's bits for the inputs that it took (bf16, as all that
// travels), whatever the plan.
//
// Ternary units (weights/ternary/tensor_core.py) are 16 rows x 128 columns, four products of one AND each, as in
// ternary/decode.cu. Units of an int8 head are 16 rows x 32 columns: a product whose columns are the coarse and the fine
// values of the inputs. Unit i of a task belongs to warp i % MK_WARPS, two of each stage. Inputs stand in the order of
// their columns, a byte each; the lanes of a warp read them together, so that all columns of B are the same.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/divide.cuh"
#include "ptx/dp4a.cuh"
#include "tile/product.cuh"

constexpr float LEAST = 1e-5f;  // of the largest absolute input: as the models do
constexpr float FINE = 254.0f;  // steps of a fine value in one coarse: half a step either way fits an int8
constexpr u32 GROUPS = SCALE_GROUP == 0 ? 1 : 128 / (SCALE_GROUP + (SCALE_GROUP == 0));  // scales of a unit's row

// What quantised products keep in shared memory, behind the residual; onekernel/plan/shared.py lays it out the same way.
// Where it begins is computed anew at each use: 96 registers a thread have no room for it.
struct Quantised {
  static constexpr u32 LARGEST = MK_WARPS * 8, TOTALS = LARGEST + MK_WARPS * 4, Y = TOTALS + MK_WARPS * 4;
  u32 at, inputs;

  __device__ __forceinline__ explicit Quantised(const Machine& m) : at(m.shared.rest_at()), inputs(m.header.max_inputs) {}

  __device__ __forceinline__ double* squares() const { return Shared::at<double>(at); }            // (MK_WARPS)
  __device__ __forceinline__ float* largest() const { return Shared::at<float>(at + LARGEST); }    // (MK_WARPS)
  __device__ __forceinline__ i32* totals() const { return Shared::at<i32>(at + TOTALS); }          // (MK_WARPS) of int8 values
  __device__ __forceinline__ float4* y() const { return Shared::at<float4>(at + Y); }              // (max_inputs / 4)
  __device__ __forceinline__ i32* groups() const { return Shared::at<i32>(at + Y + inputs * 4); }  // of int8 values
  // (row tiles, scales of a row, QUANTISED_ROWS)
  __device__ __forceinline__ float* scales() const {
    return Shared::at<float>(at + Y + inputs * 4 + round_up((inputs + 63) / 64, 4) * 4);
  }
};

// The larger one; NaN if either is.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// After a meeting: what the inputs were multiplied with to become int8.
__device__ __forceinline__ float inverse_of(const Quantised& own) {
  float most = LEAST;
#pragma unroll 4
  for (u32 w = 0; w < MK_WARPS; w++) most = larger(most, own.largest()[w]);
  return __fmul_rn(divide_ordinary(1.0f, most), 127.0f);  // in this order: so PyTorch divides a number by a tensor
}

// After a meeting: 1 / root mean square of `count` inputs.
__device__ __forceinline__ float root_of(const Quantised& own, u32 count, float eps) {
  double sum = 0;
#pragma unroll 4
  for (u32 w = 0; w < MK_WARPS; w++) sum += own.squares()[w];
  return divide_ordinary(1.0f, root_ordinary(mean_of(sum, count) + eps));
}

// How many values the norm before a product is over.
__device__ __forceinline__ u32 norm_count(const Machine& m, const Task& task) {
  const Kind kind = static_cast<Kind>(task.kind);
  return kind == Kind::OUT ? task.inputs : kind == Kind::DOWN ? m.header.inner : m.header.hidden;
}

__device__ __forceinline__ i32 add_bytes(u32 bytes, i32 sum) { return dp4a_ss(bytes, 0x01010101, sum); }

__device__ __forceinline__ u32 four_bytes(i32 a, i32 b, i32 c, i32 d) {
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | static_cast<u32>(d) << 24;
}

// What the rounding of y to a coarse value left, in fine steps.
__device__ __forceinline__ i32 fine_of(float scaled, i32 coarse) {
  return __float2int_rn(__fmul_rn(scaled - static_cast<float>(coarse), FINE));
}

// Takes the task's inputs, and leaves their int8 values in shared.x(): (columns of whole units), then the fine ones if it
// is the head; also their sums, and what inverse_of needs. All consumers call it; no meeting follows its last stores.
// A thread keeps to its own fours of values until they are int8, so all that it waits for the others for is two sums.
__device__ __forceinline__ bool take_quantised(const Machine& m, const Task& task, u32 columns) {
  constexpr u32 UNROLL = 2;  // four would spill
  const Quantised own(m);
  const u32 fours = task.inputs / 4;
  uint2* taken = reinterpret_cast<uint2*>(m.shared.x());  // (fours): bf16, until all have read their own
  const bool normed = task.norm != 0;
  if (normed) {
    const float4* norm = reinterpret_cast<const float4*>(m.launch.constants + task.norm - 1);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < fours; i += CONSUMERS) async_copy(own.y() + i, norm + i, true);
  }
  async_copies_commit();
  double squares = 0;
  float most = 0;
  const u32 before = task.in_word / 2;
  bool ok = take_pairs<CONSUMERS, UNROLL>(
      m.watch, reinterpret_cast<const Pair*>(m.launch.exchange), before + fours, m.tag_of(task.in_phase),
      before + threadIdx.x, [&](u32 pair, u32 a, u32 b) {
        const float4 v = make_float4(bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b));
        if (normed) {
          taken[pair - before] = make_uint2(a, b);
          // The square of a bf16 value is a whole float.
          squares += (static_cast<double>(v.x * v.x) + static_cast<double>(v.y * v.y)) +
                     (static_cast<double>(v.z * v.z) + static_cast<double>(v.w * v.w));
        } else {
          own.y()[pair - before] = v;
          most = larger(larger(larger(most, fabsf(v.x)), fabsf(v.y)), larger(fabsf(v.z), fabsf(v.w)));
        }
      });
  async_copies_wait<0>();
  if (normed) {
    squares = warp_sum(squares);
    if (lane_index() == 0) own.squares()[warp_index()] = squares;
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
    const float root = root_of(own, norm_count(m, task), m.header.eps);
#pragma unroll 1
    for (u32 i = threadIdx.x; ok && i < fours; i += CONSUMERS) {
      const uint2 x = taken[i];
      float4 y = own.y()[i];
      y = make_float4(bf16_low(x.x) * root * y.x, bf16_high(x.x) * root * y.y, bf16_low(x.y) * root * y.z,
                      bf16_high(x.y) * root * y.w);
      own.y()[i] = y;
      most = larger(larger(larger(most, fabsf(y.x)), fabsf(y.y)), larger(fabsf(y.z), fabsf(y.w)));
    }
  }
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) most = larger(most, shuffle_xor(most, mask));
  if (lane_index() == 0) own.largest()[warp_index()] = most;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  const float inverse = inverse_of(own);
  i32 total = 0;
  u32* x = m.shared.x();
  // Whole units: all lanes of a warp go on together. Columns behind the inputs have weight 0 and are 0 themselves.
#pragma unroll 1
  for (u32 i = threadIdx.x; i < columns / 4; i += CONSUMERS) {
    float4 y = make_float4(0, 0, 0, 0);
    if (ok && i < fours) y = own.y()[i];
    y = make_float4(__fmul_rn(y.x, inverse), __fmul_rn(y.y, inverse), __fmul_rn(y.z, inverse), __fmul_rn(y.w, inverse));
    const i32 a = __float2int_rn(y.x), b = __float2int_rn(y.y), c = __float2int_rn(y.z), d = __float2int_rn(y.w);
    const u32 four = four_bytes(a, b, c, d);
    x[i] = four;
    if (HEAD_INT8 && task.flags & FLAG_INT8) {
      x[m.header.max_inputs / 4 + i] = four_bytes(fine_of(y.x, a), fine_of(y.y, b), fine_of(y.z, c), fine_of(y.w, d));
      continue;
    }
    if (SCALE_GROUP == 0) {
      total = add_bytes(four, total);
      continue;
    }
    i32 sum = add_bytes(four, 0);
#pragma unroll
    for (u32 mask = 1; mask < SCALE_GROUP / 4; mask *= 2) sum += shuffle_xor(sum, mask);
    if (i % (SCALE_GROUP / 4 + (SCALE_GROUP == 0)) == 0) own.groups()[i * 4 / (SCALE_GROUP + (SCALE_GROUP == 0))] = sum;
  }
  if (SCALE_GROUP == 0) {
    total = warp_sum(total);
    if (lane_index() == 0) own.totals()[warp_index()] = total;
  }
  return ok;
}

// One warp's way through the units of its task, and the sums of the row tile that it is in.
template <bool INT8>
struct Multiplier {
  static constexpr u32 PARTS = INT8 ? 1 : 4, CHUNKS = INT8 ? 2 : 8;  // CHUNKS: 16 bytes of inputs for a unit
  i32 sums[PARTS][4] = {};  // of product i, times 4^i: rows lane / 4 and + 8, columns lane % 4 * 2 and + 1
  const u8* x;              // this lane's inputs of unit 0 of a row tile
  i32* parts;               // this lane's place among the sums of the row tile
  u32 k, k_units, rows;     // k: of the warp's next unit

  __device__ __forceinline__ Multiplier(const Machine& m, u32 row_tiles, u32 units, u32 lane, u32 warp)
      : k(warp), k_units(units), rows(row_tiles * QUANTISED_ROWS) {
    const u8* own = reinterpret_cast<const u8*>(m.shared.x());
    x = INT8 ? own + (lane / 4 % 2) * m.header.max_inputs + lane % 4 * 8 : own + lane % 4 * 16;
    parts = reinterpret_cast<i32*>(m.shared.partial()) + lane / 4;
    if (INT8 || SCALE_GROUP == 0) parts += warp * rows * (INT8 ? 2 : 1);
    advance();
  }

  // Goes on to the row tile of the next unit.
  __device__ __forceinline__ void advance() {
#pragma unroll 1
    for (; k >= k_units; k -= k_units) parts += QUANTISED_ROWS;
  }

  __device__ __forceinline__ void add(const uint4& w, u32 lane) {
    const u8* at = x + k * CHUNKS * 16;
    if (INT8) {
      const uint2 b = *reinterpret_cast<const uint2*>(at);
      mma_s8s8(sums[0], w.x, w.y, w.z, w.w, b.x, b.y);
    } else {
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const uint4 b = *reinterpret_cast<const uint4*>(at + half * 64);
        const u32 even = 0x03030303u << 4 * half, odd = even << 2;
        mma_u8s8(sums[2 * half % PARTS], w.x & even, w.y & even, w.z & even, w.w & even, b.x, b.y);
        mma_u8s8(sums[(2 * half + 1) % PARTS], w.x & odd, w.y & odd, w.z & odd, w.w & odd, b.z, b.w);
      }
    }
    if (!INT8 && SCALE_GROUP > 0) {
#pragma unroll
      for (u32 group = 0; group < GROUPS; group++)
        put(parts + (k * GROUPS + group) * rows, group * PARTS / GROUPS, PARTS / GROUPS, lane);
    }
    k += MK_WARPS;
    if (k < k_units) return;
    if (INT8 || SCALE_GROUP == 0) put(parts, 0, PARTS, lane);
    advance();
  }

  // Stores the sums of `count` products from `first` on, which start again from zero. The codes' offset is still in them.
  __device__ __forceinline__ void put(i32* to, u32 first, u32 count, u32 lane) {
    i32 sum[4] = {};
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
      if (i < first || i >= first + count) continue;
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        sum[c] += sums[i][c] >> 2 * i;
        sums[i][c] = 0;
      }
    }
    if (lane % 4 != 0) return;
    to[0] = sum[0];
    to[8] = sum[2];
    if (!INT8) return;
    to[rows] = sum[1];
    to[rows + 8] = sum[3];
  }
};

// Multiplies `row_tiles` row tiles, which start at a whole stage, and leaves whole-number sums in shared.partial:
// (MK_WARPS, rows), for int8 (MK_WARPS, 2, rows), or with groups (groups, rows). A meeting follows. See Walk for `ok`.
template <bool INT8>
__device__ __forceinline__ bool multiply_quantised(Machine& m, u32 row_tiles, u32 k_units, bool ok) {
  const u32 lane = kept(lane_index()), warp = kept(warp_index()), units = row_tiles * k_units;
  const u8* mine = m.ring.stages + warp * QUANTISED_UNIT_BYTES + lane * sizeof(uint4);
  Multiplier<INT8> own(m, row_tiles, k_units, lane, warp);
#pragma unroll 1
  for (u32 first = warp; first < units + warp; first += QUANTISED_STAGE_UNITS) {
    ok = ok && m.take(m.at);
    const uint4* unit = reinterpret_cast<const uint4*>(mine + m.at.stage * STAGE_BYTES);
    uint4 a{}, b{};
    if (first < units) a = unit[0];
    if (first + MK_WARPS < units) b = unit[MK_WARPS * WARP];
    m.ring.free(m.at, ok);
    m.at.advance();
    if (first < units) own.add(a, lane);
    if (first + MK_WARPS < units) own.add(b, lane);
  }
  return ok;
}

// Starts copying the scales of a run's rows; they are there after this thread's wait and a meeting.
__device__ __forceinline__ void fetch_scales(const Machine& m, const Task& task, const Rows& rows) {
  const Header& header = m.header;
  const Kind kind = static_cast<Kind>(task.kind);
  const u32 of_row = HEAD_INT8 && kind == Kind::HEAD ? 1 : SCALE_GROUP == 0 ? 1 : rows.k_units * GROUPS;
  u32 from = header.qkv_scales + (HEAD_INT8 && kind == Kind::HEAD ? header.layers : task.layer) * header.layer_scales;
  if (kind == Kind::OUT) from += header.out_scales - header.qkv_scales;
  if (kind == Kind::GATE_UP) from += header.gate_up_scales - header.qkv_scales;
  if (kind == Kind::DOWN) from += header.down_scales - header.qkv_scales;
  from += rows.first * of_row;
  const float4* source = reinterpret_cast<const float4*>(m.launch.constants + from);
  float4* to = reinterpret_cast<float4*>(Quantised(m).scales());
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows.count * of_row / 4; i += CONSUMERS) async_copy(to + i, source + i, true);
  async_copies_commit();
}

// Results of rows `row` and `row` + 1, without bias.
template <bool INT8>
__device__ __forceinline__ float2 quantised_pair(const Machine& m, const Rows& rows, u32 row) {
  const Quantised own(m);
  const float inverse = inverse_of(own);
  const i32* parts = reinterpret_cast<const i32*>(m.shared.partial()) + row;
  if (!INT8 && SCALE_GROUP > 0) {
    const u32 groups = rows.k_units * GROUPS;
    const float* scales = own.scales() + row / QUANTISED_ROWS * groups * QUANTISED_ROWS + row % QUANTISED_ROWS;
    float2 total = make_float2(0, 0);
#pragma unroll 4
    for (u32 group = 0; group < groups; group++) {
      const uint2 sum = *reinterpret_cast<const uint2*>(parts + group * rows.count);
      const float2 scale = *reinterpret_cast<const float2*>(scales + group * QUANTISED_ROWS);
      const i32 offset = own.groups()[group];
      // Each term is rounded by itself: with a fused one, bits would depend on the compiler.
      total.x += __fmul_rn(static_cast<float>(static_cast<i32>(sum.x) - offset), scale.x);
      total.y += __fmul_rn(static_cast<float>(static_cast<i32>(sum.y) - offset), scale.y);
    }
    return make_float2(divide_ordinary(total.x, inverse), divide_ordinary(total.y, inverse));
  }
  i32 sum[2] = {}, rest[2] = {};
  u32 warp = (row >> rows.tile_shift) * rows.k_units % MK_WARPS;  // that had the row tile's first unit
#pragma unroll 4
  for (u32 part = 0; part < min(rows.k_units, static_cast<u32>(MK_WARPS)); part++) {
    const i32* at = parts + warp * rows.count * (INT8 ? 2 : 1);
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    sum[0] += static_cast<i32>(v.x);
    sum[1] += static_cast<i32>(v.y);
    if (INT8) {
      const uint2 fine = *reinterpret_cast<const uint2*>(at + rows.count);
      rest[0] += static_cast<i32>(fine.x);
      rest[1] += static_cast<i32>(fine.y);
    }
    warp = warp + 1 == MK_WARPS ? 0 : warp + 1;
  }
  const float2 scale = *reinterpret_cast<const float2*>(own.scales() + row);
  float2 value;
  if (INT8) {
    value = make_float2(static_cast<float>(sum[0]) + divide_ordinary(static_cast<float>(rest[0]), FINE),
                        static_cast<float>(sum[1]) + divide_ordinary(static_cast<float>(rest[1]), FINE));
  } else {
    i32 offset = 0;
#pragma unroll 4
    for (u32 w = 0; w < MK_WARPS; w++) offset += own.totals()[w];
    value = make_float2(static_cast<float>(sum[0] - offset), static_cast<float>(sum[1] - offset));
  }
  // Rounded by itself: fused with the residual or bias that it is added to, it would have bits of its own.
  return make_float2(__fmul_rn(value.x, divide_ordinary(scale.x, inverse)),
                     __fmul_rn(value.y, divide_ordinary(scale.y, inverse)));
}

// Calls give(row, value) for each pair of neighbouring rows; see for_row_pairs.
template <class Give>
__device__ __forceinline__ void for_quantised_pairs(const Machine& m, const Task& task, const Rows& rows, Give give) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i - lane_index() < rows.count / 2; i += CONSUMERS) {
    const u32 row = min(i * 2, rows.count);
    float2 value = make_float2(0, 0);
    if (row < rows.count) value = add_bias(m, task, quantised_pair<false>(m, rows, row), rows.first + row);
    give(row, value);
  }
}

// Takes, multiplies, and calls finish(rows), by all consumers, for each run of rows. The layers' phases are one run each;
// an int8 head takes as many row tiles at once as end with a stage and have room for their sums.
template <class Finish>
__device__ __forceinline__ bool quantised_product(Machine& m, const Task& task, Finish finish) {
  const bool int8 = HEAD_INT8 && task.flags & FLAG_INT8;
  bool ok = take_quantised(m, task, task.k_units * (int8 ? 32 : 128));
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  m.mark(Mark::TAKEN);
  u32 run = task.count;
  if (int8) {
    u32 step = 1;
    while (step * task.k_units % QUANTISED_STAGE_UNITS != 0) step++;
    run = m.header.max_rows / 2 / QUANTISED_ROWS / step * step;
  }
#pragma unroll 1
  for (u32 tile = 0; tile < task.count; tile += run) {
    const u32 tiles = min(run, task.count - tile);
    const Rows rows{(task.first + tile) * QUANTISED_ROWS, tiles * QUANTISED_ROWS, task.k_units, 4};
    fetch_scales(m, task, rows);
    ok = int8 ? multiply_quantised<true>(m, tiles, task.k_units, ok) : multiply_quantised<false>(m, tiles, task.k_units, ok);
    m.mark(Mark::MULTIPLIED);
    async_copies_wait<0>();
    if (!m.meet(ok)) return false;
    m.mark(Mark::MET);
    finish(rows);
    if (tile + run < task.count) barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  return true;
}
