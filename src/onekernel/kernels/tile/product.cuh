// A phase's product: take the inputs, multiply the CTA's rows with them on the tensor cores, sum the warps' parts.
//
// Weights come in units of 1 KiB (onekernel/weights/dense.py): 8 rows x 64 columns, or 4 rows x 128 columns, whose second
// 64 columns stand where rows 4 to 7 would. Unit i of a task belongs to warp i % MK_WARPS, so all warps work whatever
// the shape. A sum over K is split by unit number modulo MK_WARPS and added up in that order: its bits depend on the
// shape, not on how rows are shared out.
#pragma once

#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "tile/machine.cuh"

// Stores values 4 * index to 4 * index + 3. One sequence: of each 16 values, words 0, 2, 4, 6 and then words 1, 3, 5, 7, so
// that a lane of `multiply_one` finds both its B fragments in 16 consecutive bytes.
__device__ __forceinline__ void store_pair(u32* x, u32 index, u32 first, u32 second) {
  u32* to = SEQUENCES == 1 ? x + index / 4 * 8 + index % 4 : x + index * 2;
  to[0] = first;
  to[SEQUENCES == 1 ? 4 : 1] = second;
}

// One sequence's inputs: UNROLL pairs of words a thread at once, to shared.x() as bf16; if NORMED, multiplied by the norm's
// weights, which come meanwhile, and their squares are added to `squares`.
template <bool NORMED, u32 UNROLL>
__device__ __forceinline__ bool take_sequence(const Machine& m, const float* norm, u32 word, u32 pairs, u32 want, u32* x, float& squares) {
#pragma unroll 1
  for (u32 first = threadIdx.x; first < pairs; first += CONSUMERS * UNROLL) {
    const u32 count = (pairs - first + CONSUMERS - 1) / CONSUMERS;
    // Set, or the compiler would keep what it was before in registers, eight of them throughout the kernel.
    float4 scale[NORMED ? UNROLL : 1] = {};
    Pair taken[UNROLL];
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++)
      if (NORMED && i < count) scale[i] = reinterpret_cast<const float4*>(norm)[first + i * CONSUMERS];
    const Pair* const words = reinterpret_cast<const Pair*>(m.launch.exchange + word) + first;
    if (!wait_pairs<CONSUMERS>(m.watch, words, count, want, word + 2 * first, taken)) return false;
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++) {
      if (i >= count) continue;
      u32 a = static_cast<u32>(taken[i].first), b = static_cast<u32>(taken[i].second);
      if (NORMED) {
        const float v[4] = {bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)};
        squares += v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
        a = bf16_pair(v[0] * scale[i].x, v[1] * scale[i].y);
        b = bf16_pair(v[2] * scale[i].z, v[3] * scale[i].w);
      }
      store_pair(x, first + i * CONSUMERS, a, b);
    }
  }
  return true;
}

// Takes the task's inputs of every sequence to shared memory as bf16, multiplied by the norm's weights if there is one,
// and leaves each warp's sum of squares in shared.sums(). All consumers call it; a meeting follows.
__device__ __forceinline__ bool take_inputs(const Machine& m, const Task& task, u32 unit_columns) {
  const u32 pairs = task.inputs / 4, want = m.tag_of(task.in_phase), stride = input_words(m.header, static_cast<Kind>(task.kind));
  const u32 each = (pairs + CONSUMERS - 1) / CONSUMERS;  // of a thread
  bool ok = true;
  const float* norm = task.norm == 0 ? nullptr : m.launch.constants + task.norm - 1;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 word = task.in_word + s * stride;
    u32* x = m.shared.x() + s * (m.header.max_inputs / 2);
    float squares = 0;
    // Whoever gives up goes on to the shuffles below, where the warp's other lanes expect it. With a norm inputs are as wide
    // as the residual, and its weights take registers too.
    if (norm != nullptr)
      ok = each == 1 ? ok && take_sequence<true, 1>(m, norm, word, pairs, want, x, squares)
                     : ok && take_sequence<true, 2>(m, norm, word, pairs, want, x, squares);
    else if (each <= 2)
      ok = each == 1 ? ok && take_sequence<false, 1>(m, norm, word, pairs, want, x, squares)
                     : ok && take_sequence<false, 2>(m, norm, word, pairs, want, x, squares);
    else
      ok = ok && take_sequence<false, 4>(m, norm, word, pairs, want, x, squares);
    // Columns between the inputs and the next whole unit have zero weights, but zero times NaN is NaN.
#pragma unroll 1
    for (u32 i = pairs + threadIdx.x; i < task.k_units * unit_columns / 4; i += CONSUMERS) store_pair(x, i, 0, 0);
    if (norm == nullptr) continue;
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
    if (lane_index() == 0) m.shared.sums()[s * MK_WARPS + warp_index()] = squares;
  }
  return ok;
}

// After the meeting: what the warps left of a sequence's inputs, if there is a norm. Loaded apart from its use, so that it comes
// together with the sums that it is for.
struct Norm {
  bool normed;
  float4 sums[MK_WARPS / 4] = {};

  __device__ __forceinline__ Norm(const Machine& m, const Task& task, u32 sequence) : normed(task.norm != 0) {
    // By the ring's address, which is in a register; that of shared memory would be asked for anew.
    const float4* from = reinterpret_cast<const float4*>(m.ring.stages + Shared::SUMS) + sequence * (MK_WARPS / 4);
#pragma unroll
    for (u32 w = 0; w < MK_WARPS / 4; w++)
      if (normed) sums[w] = from[w];
  }

  // Of the sequence's results: 1 / root mean square of its inputs; 1 without a norm.
  __device__ __forceinline__ float factor(const Header& header) const {
    if (!normed) return 1.0f;
    float sum = 0;
#pragma unroll
    for (u32 w = 0; w < MK_WARPS / 4; w++) sum += (sums[w].x + sums[w].y) + (sums[w].z + sums[w].w);
    return rsqrtf(sum * __fdividef(1.0f, static_cast<float>(forget(header.hidden))) + header.eps);
  }
};

// The same value, out of a shuffle. Without it the compiler reads threadIdx anew in every round, 20 cycles each time.
__device__ __forceinline__ u32 kept(u32 value) { return shuffle_index(value, lane_index()); }

// Whether a part of K is a pair of neighbouring units: half of the warps take a stage, the others the next. A wait and an
// arrival then serve two units; that is what counts after a hand-over, when the ring is full. A pair must lie in one row
// tile, and with an odd number of stages a ring stage would change hands in every round (tile/ring.cuh).
constexpr bool CAN_PAIR = SEQUENCES == 1 && MK_STAGES % 2 == 0 && MK_WARPS % 2 == 0;
__device__ __forceinline__ bool in_pairs(u32 k_units) { return CAN_PAIR && k_units % 2 == 0; }
// Parts that K is cut into, before they are given to warp after warp.
__device__ __forceinline__ u32 k_parts(u32 k_units) { return in_pairs(k_units) ? k_units / 2 : k_units; }

// Where in shared.partial() the part of a row lies that is number `part` modulo MK_WARPS: (rows, PART_SLOTS). A thread reads
// the parts of its row 4 at a time; these quarters are permuted so that 8 neighbouring rows have theirs in different banks.
constexpr u32 PART_SLOTS = round_up(MK_WARPS, 4), PART_CHUNKS = PART_SLOTS / 4;
__device__ __forceinline__ u32 part_chunk(u32 row, u32 chunk) {
  constexpr bool PERMUTED = (PART_CHUNKS & (PART_CHUNKS - 1)) == 0;
  return row * PART_SLOTS + (PERMUTED ? chunk ^ row * PART_SLOTS / WARP % PART_CHUNKS : chunk) * 4;
}
__device__ __forceinline__ u32 part_at(u32 row, u32 part) { return part_chunk(row, part / 4) + part % 4; }

// Builds with the sparse phases or with ternary ones, whose own products begin early, have no registers left for it.
constexpr bool BEGINS_EARLY = SEQUENCES == 1 && !SPARSE && !TERNARY;

// A warp's way through a product of one sequence, part by part: a pair of units, or a unit. Part i of a run belongs to warp
// i % MK_WARPS, so of pairs a stage belongs to half of the warps. It begins before the inputs are there, when nobody waits for
// it: the first weights are in registers when they come.
// `ok` is false for a thread that gave up a wait. It waits no more, but goes through all stages with its warp: only the
// CTA's meeting may part them, and the result is dropped there.
struct Walk {
  u32 lane = kept(lane_index()), warp = kept(warp_index());
  MegaCursor at;
  u32 parts, to_take;  // to_take: stages in which this warp may have parts
  u32 k, row;          // of the warp's next part in its row tile; of which the lane may have the sum
  u32 step_k = MK_WARPS, step_rows = 0;  // from part to part
  // Of the lane in a part's inputs, by 16 bytes, and in a stage. Known before the inputs come: what follows them counts.
  u32 x_at = forget(lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2), stage_at;
  uint4 weights[4] = {};

  __device__ __forceinline__ Walk(const Machine& m, u32 row_tiles, u32 k_parts, u32 tile_rows, bool pairs)
      : at(m.at), parts(row_tiles * k_parts), to_take(stages(pairs)), k(warp), row(lane / 4) {
    if (pairs) {
      to_take = (to_take + 1 - warp / (MK_WARPS / 2)) / 2;
      if (warp >= MK_WARPS / 2) at.advance();
    }
    for (; k >= k_parts; row += tile_rows) k -= k_parts;
    for (; step_k >= k_parts; step_rows += tile_rows) step_k -= k_parts;
    stage_at = forget((pairs ? warp % (MK_WARPS / 2) * 2 : warp) * UNIT_BYTES + lane * 16);
  }

  // Of the run.
  __device__ __forceinline__ u32 stages(bool pairs) const {
    return pairs ? (parts + MK_WARPS / 2 - 1) / (MK_WARPS / 2) : (parts + MK_WARPS - 1) / MK_WARPS;
  }

  // Takes the weights of the warp's next part.
  template <u32 UNITS>
  __device__ __forceinline__ bool load(Machine& m, bool ok) {
    ok = ok && m.take(at);
    const uint4* unit = reinterpret_cast<const uint4*>(m.ring.stages + at.stage * STAGE_BYTES + stage_at);
#pragma unroll
    for (u32 i = 0; i < 2 * UNITS; i++) weights[i] = unit[i * WARP];
    m.ring.free(at, ok, UNITS);
    at.skip<UNITS>();
    to_take--;
    return ok;
  }

  // Takes those of its first part, if it has one.
  __device__ __forceinline__ bool begin(Machine& m, bool pairs, bool ok) {
    if (warp >= parts) return ok;
    return pairs ? load<2>(m, ok) : load<1>(m, ok);
  }
};

// Multiplies the row tiles of a walk that has begun, which start at a whole stage, with the inputs of one sequence, and leaves
// the parts of each row in shared.partial(). A meeting follows. UNITS: of a part, of which a row tile has k_parts.
//
// The 16 bytes that a lane loads are a whole A fragment: the unit's 8 rows with half of their columns take A's rows 0 to
// 7, and the same 8 rows with the other half its rows 8 to 15. Column 0 of B holds the x of the first half, column 1 that
// of the second, so c[0] of column 0 and c[3] of column 1 are the two parts of a row's sum, and both are in lane 4 * row.
// Rows 4 to 7 of a 4-row unit are its second 64 columns; their x are columns 2 and 3 of B, their sums in lane 4 * row + 1.
//
// The sum of a row tile is stored while the next weights are on their way from shared memory.
template <bool ROWS_4, u32 UNITS>
__device__ __forceinline__ bool multiply_one(Machine& m, Walk& walk, u32 k_parts, bool ok) {
  constexpr u32 ROWS = ROWS_4 ? 4 : 8, UNIT_CHUNKS = ROWS_4 ? 16 : 8, UNIT_LANES = ROWS_4 ? 16 : 8;
  const u32 lane = walk.lane;
  const uint4* x = reinterpret_cast<const uint4*>(m.shared.x()) + walk.x_at;
  uint4 x_first{}, x_second{};  // B has no more than UNIT_LANES lanes of x; in the others it stays 0
  u32 first = walk.k;           // of the warp's parts in this row tile
  float even[4] = {}, odd[4] = {};
#pragma unroll 1
  for (u32 i = walk.warp; i < walk.parts;) {
    if (lane < UNIT_LANES) {
      x_first = x[UNITS * walk.k * UNIT_CHUNKS];
      if (UNITS == 2) x_second = x[(2 * walk.k + 1) * UNIT_CHUNKS];
    }
    const uint4(&w)[4] = walk.weights;
    mma_bf16(even, w[0].x, w[0].y, w[0].z, w[0].w, x_first.x, x_first.y);
    mma_bf16(odd, w[1].x, w[1].y, w[1].z, w[1].w, x_first.z, x_first.w);
    if (UNITS == 2) {
      mma_bf16(even, w[2].x, w[2].y, w[2].z, w[2].w, x_second.x, x_second.y);
      mma_bf16(odd, w[3].x, w[3].y, w[3].z, w[3].w, x_second.z, x_second.w);
    }
    i += MK_WARPS;
    if (i < walk.parts) ok = walk.load<UNITS>(m, ok);
    const u32 row = walk.row;
    walk.k += walk.step_k;
    walk.row += walk.step_rows;
    if (walk.k >= k_parts) {
      walk.k -= k_parts;
      walk.row += ROWS;
    }
    if (walk.row == row && i < walk.parts) continue;
    float sum = (even[0] + even[3]) + (odd[0] + odd[3]);
    if (ROWS_4) sum += shuffle_index(sum, (lane + 17) % WARP);
    if (lane % 4 == 0 && lane / 4 < ROWS) m.shared.partial()[part_at(row, first)] = sum;
    first = walk.k;
#pragma unroll
    for (u32 j = 0; j < 4; j++) even[j] = odd[j] = 0;
  }
  if (walk.to_take > 0) {  // the last stage, in which only others have parts
    ok = ok && m.take(walk.at);
    m.ring.free(walk.at, ok, UNITS);
  }
  m.at.advance(walk.stages(UNITS == 2));
  return ok;
}

// Where a warp is in its task's sequence of units.
struct Place {
  u32 row_tile, k;

  // Goes on to the warp's next unit.
  __device__ __forceinline__ void advance(u32 k_units) {
    for (k += MK_WARPS; k >= k_units; k -= k_units) row_tile++;
  }
};

// The same for eight sequences: (SEQUENCES, rows, PART_SLOTS). The weights are B here, so that a row of A can be
// a sequence; with 4-row units rows 8 to 15 are the sequences' second 64 columns, whose sums stand at columns 4 to 7.
template <bool ROWS_4>
__device__ __forceinline__ bool multiply_eight(Machine& m, u32 row_tiles, u32 k_units, bool ok) {
  constexpr u32 ROWS = ROWS_4 ? 4 : 8, UNIT_WORDS = ROWS_4 ? 64 : 32;
  const u32 lane = lane_index(), warp = warp_index(), sequence = lane / 4, quarter = lane % 4;
  const u32 units = row_tiles * k_units, rows = row_tiles * ROWS;
  const u32* x = m.shared.x() + sequence * (m.header.max_inputs / 2) + quarter * 8;
  Place place{warp / k_units, warp % k_units};
  u32 part = place.k;  // with which the sums begin
  float even[4] = {}, odd[4] = {};
#pragma unroll 1
  for (u32 first = warp; first < units + warp; first += STAGE_UNITS, m.at.advance()) {
    ok = ok && m.take(m.at);
    const uint4* unit = reinterpret_cast<const uint4*>(m.ring.stages + m.at.stage * STAGE_BYTES + warp * UNIT_BYTES) + lane;
    if (first < units) {
      const uint4* low = reinterpret_cast<const uint4*>(x + place.k * UNIT_WORDS);
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const uint4 w = unit[half * WARP], a = low[half], b = ROWS_4 ? low[8 + half] : make_uint4(0, 0, 0, 0);
        mma_bf16(even, a.x, b.x, a.y, b.y, w.x, w.y);
        mma_bf16(odd, a.z, b.z, a.w, b.w, w.z, w.w);
      }
    }
    m.ring.free(m.at, ok);
    if (first >= units) continue;
    const Place here = place;
    place.advance(k_units);
    if (place.row_tile == here.row_tile) continue;
    float sum[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      sum[i] = even[i] + odd[i];
      even[i] = odd[i] = 0;
    }
    if (ROWS_4) {
      sum[0] += shuffle_xor(sum[2], 2);
      sum[1] += shuffle_xor(sum[3], 2);
    }
    if (quarter < ROWS / 2) {
      const u32 row = sequence * rows + here.row_tile * ROWS + quarter * 2;
      m.shared.partial()[part_at(row, part)] = sum[0];
      m.shared.partial()[part_at(row + 1, part)] = sum[1];
    }
    part = place.k;
  }
  return ok;
}

template <bool ROWS_4>
__device__ __forceinline__ bool multiply(Machine& m, Walk& walk, u32 row_tiles, u32 k_units, bool ok) {
  static_assert(SEQUENCES == 1 || SEQUENCES == 8, "a row of A, or a column of B, for each");
  if (SEQUENCES > 1) return multiply_eight<ROWS_4>(m, row_tiles, k_units, ok);
  if (in_pairs(k_units)) return multiply_one<ROWS_4, 2>(m, walk, k_units / 2, ok);
  return multiply_one<ROWS_4, 1>(m, walk, k_units, ok);
}

// Rows whose parts lie in shared.partial(): `count` rows from `first` of the whole matrix on, 1 << tile_shift a row tile.
struct Rows {
  u32 first, count, k_units, tile_shift;
};

// The sum of a row of a sequence over all parts. What is not there counts as zero: branches would take longer.
__device__ __forceinline__ float sum_parts(const Machine& m, const Rows& rows, u32 sequence, u32 row) {
  const u32 parts = min(k_parts(rows.k_units), static_cast<u32>(MK_WARPS)), at = sequence * rows.count + row;
  float4 v[PART_CHUNKS] = {};
#pragma unroll
  for (u32 c = 0; c < PART_CHUNKS; c++)
    if (4 * c < parts) v[c] = *reinterpret_cast<const float4*>(m.shared.partial() + part_chunk(at, c));
  float sum = 0;
#pragma unroll
  for (u32 c = 0; c < PART_CHUNKS; c++) {
    const u32 first = 4 * c;
    sum += (v[c].x + (first + 1 < parts ? v[c].y : 0)) + ((first + 2 < parts ? v[c].z : 0) + (first + 3 < parts ? v[c].w : 0));
  }
  return sum;
}

// Adds the biases of rows `row` and `row` + 1 of the whole matrix.
__device__ __forceinline__ float2 add_bias(const Machine& m, const Task& task, float2 sum, u32 row) {
  if (task.bias == 0) return sum;
  const float2 bias = *reinterpret_cast<const float2*>(m.launch.constants + task.bias - 1 + row);
  return make_float2(sum.x + bias.x, sum.y + bias.y);
}

// Calls give(sequence, row, value) for each pair of neighbouring rows, with the pair's results: normalised, and with bias.
// Whole warps call it: lane by lane for the rows, and for an odd one, or one that does not exist, `row` is rows.count. The last
// warps have the first rows: the first ones are about to take the next phase's inputs.
template <class Give>
__device__ __forceinline__ void for_row_pairs(const Machine& m, const Task& task, const Rows& rows, Give give) {
#pragma unroll 1
  for (u32 i = (MK_WARPS - 1 - warp_index()) * WARP + lane_index(); i - lane_index() < rows.count * SEQUENCES; i += CONSUMERS) {
    const u32 sequence = SEQUENCES == 1 ? 0 : min(i / rows.count, SEQUENCES - 1), row = min(i - sequence * rows.count, rows.count);
    const Norm norm(m, task, sequence);
    float value = sum_parts(m, rows, sequence, min(row, rows.count - 1));
    value *= norm.factor(m.header);
    float2 pair = make_float2(value, shuffle_down(value, 1));
    const bool even = row < rows.count && row % 2 == 0;
    if (even) pair = add_bias(m, task, pair, rows.first + row);
    give(sequence, even ? row : rows.count, pair);
  }
}

// Takes, multiplies, and calls finish(rows), by all consumers, for each run of rows. There is one copy of this code for
// all phases: seven would not fit the instruction cache.
template <class Finish>
__device__ __forceinline__ bool product(Machine& m, const Task& task, Finish finish) {
  // Read anew from shared memory where they are wanted: registers are scarcer.
  const auto rows_4 = [&] { return (task.flags & FLAG_ROWS_4) != 0; };
  const auto tile_shift = [&] { return rows_4() ? 2u : 3u; };
  // A run that ends inside a stage would leave the next one's units behind, so all but the last are whole stages.
  const auto run = [&](u32 from) {
    const u32 fit = forget(m.header.max_rows) >> tile_shift();
    return min(task.count <= fit ? task.count : fit / STAGE_UNITS * STAGE_UNITS, task.count - from);
  };
  const bool pairs = in_pairs(task.k_units);
  u32 tiles = run(0);
  Walk walk(m, tiles, k_parts(task.k_units), 1u << tile_shift(), pairs);
  bool ok = !BEGINS_EARLY || walk.begin(m, pairs, true);
  ok = take_inputs(m, task, rows_4() ? 128 : 64) && ok;
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  m.mark(Mark::TAKEN);
  if (SEQUENCES == 1 && !BEGINS_EARLY) ok = walk.begin(m, pairs, ok);
#pragma unroll 1
  for (u32 tile = 0;;) {
    ok = rows_4() ? multiply<true>(m, walk, tiles, task.k_units, ok) : multiply<false>(m, walk, tiles, task.k_units, ok);
    m.mark(Mark::MULTIPLIED);
    if (!m.meet(ok)) return false;
    m.mark(Mark::MET);
    finish(Rows{(task.first + tile) << tile_shift(), tiles << tile_shift(), task.k_units, tile_shift()});
    tile += tiles;
    if (tile >= task.count) break;
    tiles = run(tile);
    walk = Walk(m, tiles, k_parts(task.k_units), 1u << tile_shift(), pairs);
    ok = SEQUENCES > 1 ? ok : walk.begin(m, pairs, ok);
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  return true;
}
