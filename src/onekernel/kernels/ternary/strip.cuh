// How a matrix-vector kernel reads packed ternary weights: strips of 16 rows, each shared by TERNARY_SPLIT warps.
//
// A unit is 16 rows x 128 columns, 512 bytes of a strip. Unit u belongs to warp u % TERNARY_SPLIT of the strip's warps,
// which copies it, the activations beside it and its group scales to a stage of its own ring: as many bytes are in flight
// as rings hold, and no warp waits for another until its part of the sum is whole. The parts are integers, whose sum is
// exact: its bits do not depend on how the work was shared out. With group scales the parts are the groups' terms, all of
// them, which are added in the order of K when the last one has come.
//
// Constants: TERNARY_WARPS and TERNARY_SPLIT (of a CTA, of a strip), TERNARY_STAGES, TERNARY_TOKENS (1, 2, 4 or 8),
// TERNARY_GROUP (0, 64 or 128), TERNARY_BF16 (1: results are bf16, 0: float).
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/shuffle.cuh"
#include "ternary/sum.cuh"

constexpr u32 SPLIT = TERNARY_SPLIT, STAGES = TERNARY_STAGES, TOKENS = TERNARY_TOKENS;
constexpr u32 STRIPS = TERNARY_WARPS / SPLIT;  // of a CTA
constexpr u32 X_AT = UNIT_BYTES, SCALES_AT = X_AT + TOKENS * UNIT_COLUMNS, STAGE_BYTES = SCALES_AT + GROUPS * STRIP_ROWS * 4;
constexpr u32 PARTS_AT = TERNARY_WARPS * STAGES * STAGE_BYTES;  // after the rings: (strips, parts, TOKENS, 16)
constexpr u32 PART = TOKENS * STRIP_ROWS;
constexpr u32 SHARE = SPLIT * WARP;                  // threads of a strip
constexpr u32 RESULTS = (PART + SHARE - 1) / SHARE;  // of a thread

static_assert(TERNARY_WARPS % SPLIT == 0 && STAGES >= 2, "warps of a CTA share strips evenly, and a ring has two stages");

struct Matrix {
  const u8* codes;      // (strips, strip_bytes)
  const float* scales;  // (strips, 16), or (strips, groups, 16)
  u32 strip_bytes, rows;
};

struct Activations {
  const u8* x;           // (tokens, columns) int8
  const float* inverse;  // (tokens,)
  u32 tokens, columns;
};

// One of the warps of a strip, at some place in its sequence of units. Addresses and what is left are kept up to date
// from unit to unit, so that a copy costs a comparison and itself: few instructions lie between launch and first bytes.
template <bool WHOLE_UNITS>
struct Worker {
  static constexpr u32 X_COPIES = (TOKENS * X_PIECES + WARP - 1) / WARP;

  const u8* codes;   // this lane's 16 bytes of the unit
  const u8* scales;  // with groups: of the unit
  const u8* x[X_COPIES];
  i32 bytes_left;              // of the strip, from this lane's on
  i32 columns_left[X_COPIES];  // of the token, from this lane's on; 0 if there is no such token
  u32 unit, units;
  u8* ring;

  __device__ __forceinline__ Worker(const Matrix& matrix, const Activations& in, u32 strip, u32 part)
      : unit(part),
        units((matrix.strip_bytes + UNIT_BYTES - 1) / UNIT_BYTES),
        ring(dynamic_shared() + warp_index() * STAGES * STAGE_BYTES) {
    const u32 lane = lane_index(), first = part * UNIT_BYTES + lane * 16;
    codes = matrix.codes + static_cast<u64>(strip) * matrix.strip_bytes + first;
    bytes_left = static_cast<i32>(matrix.strip_bytes - first);
    scales = reinterpret_cast<const u8*>(matrix.scales + (strip * units + part) * (GROUPS * STRIP_ROWS) + lane * 4);
#pragma unroll
    for (u32 i = 0; i < X_COPIES; i++) {
      const u32 piece = i * WARP + lane, token = piece / X_PIECES, column = part * UNIT_COLUMNS + piece % X_PIECES * 16;
      x[i] = in.x + static_cast<u64>(token) * in.columns + column;
      columns_left[i] = token < in.tokens ? static_cast<i32>(in.columns - column) : 0;
    }
  }

  // Starts copying what the unit `ahead` of this warp's units from here needs. What lies past the end of the matrix, or
  // of the activations, becomes zeros.
  __device__ __forceinline__ void fetch(u32 ahead, u8* stage) const {
    const u32 lane = lane_index(), skip = ahead * SPLIT;
    const bool there = WHOLE_UNITS ? unit + skip < units : static_cast<i32>(skip * UNIT_BYTES) < bytes_left;
    async_copy(stage + lane * 16, codes + skip * UNIT_BYTES, there);
#pragma unroll
    for (u32 i = 0; i < X_COPIES; i++) {
      const u32 piece = i * WARP + lane;
      if (piece < TOKENS * X_PIECES)
        async_copy_cached(stage + X_AT + x_piece_at(piece / X_PIECES, piece % X_PIECES), x[i] + skip * UNIT_COLUMNS,
                          static_cast<i32>(skip * UNIT_COLUMNS) < columns_left[i]);
    }
    if (lane < GROUPS * STRIP_ROWS / 4)
      async_copy(stage + SCALES_AT + lane * 16, scales + skip * (GROUPS * STRIP_ROWS * 4), unit + skip < units);
  }

  __device__ __forceinline__ void advance() {
    unit += SPLIT;
    codes += SPLIT * UNIT_BYTES;
    scales += SPLIT * GROUPS * STRIP_ROWS * 4;
    bytes_left -= SPLIT * UNIT_BYTES;
#pragma unroll
    for (u32 i = 0; i < X_COPIES; i++) {
      x[i] += SPLIT * UNIT_COLUMNS;
      columns_left[i] -= SPLIT * UNIT_COLUMNS;
    }
  }

  // Starts the first copies.
  __device__ __forceinline__ void start() const {
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
      fetch(i, ring + i * STAGE_BYTES);
      async_copies_commit();
    }
  }

  // Calls sums.add(stage, where the unit's terms go) for each of this warp's units, in order. terms: of the strip.
  template <class Sums>
  __device__ __forceinline__ void read(Sums& sums, Sum* terms) {
    u8* stage = ring;
    u8* before = ring + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
    while (unit < units) {
      async_copies_wait<STAGES - 2>();
      __syncwarp();  // shows all lanes the unit, and that all have left the stage that is filled next
      fetch(STAGES - 1, before);
      async_copies_commit();
      sums.add(stage, terms + unit * GROUPS * PART);
      advance();
      before = stage;
      stage = stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES;
    }
    async_copies_wait<0>();  // of zeros
  }
};

// The whole kernel, for either layout: read, add the parts, scale, store. out: (tokens, rows), the floats' high halves if
// TERNARY_BF16.
template <class Sums, bool WHOLE_UNITS>
__device__ __forceinline__ void multiply(const Matrix& matrix, const Activations& in, void* out) {
  const u32 in_cta = warp_index() / SPLIT, part = warp_index() % SPLIT, strip = blockIdx.x * STRIPS + in_cta;
  if (strip * STRIP_ROWS >= matrix.rows) return;
  Worker<WHOLE_UNITS> worker(matrix, in, strip, part);
  worker.start();
  // Meanwhile: what the results are multiplied with, or with groups divided by.
  const u32 thread = part * WARP + lane_index(), row = strip * STRIP_ROWS + thread % STRIP_ROWS;
  const float scale = GROUP == 0 ? matrix.scales[row] : 1.0f;
  float factor[RESULTS];
#pragma unroll
  for (u32 i = 0; i < RESULTS; i++) {
    const u32 token = (thread + i * SHARE) / STRIP_ROWS;
    factor[i] = factor_of(scale, token < in.tokens ? in.inverse[token] : 1.0f);
  }
  const u32 parts = GROUP == 0 ? SPLIT : worker.units * GROUPS;
  Sum* sums_of_parts = reinterpret_cast<Sum*>(dynamic_shared() + PARTS_AT) + in_cta * parts * PART;
  Sums sums;
  worker.read(sums, sums_of_parts);
  if (GROUP == 0) sums.store(sums_of_parts + part * PART);
  if (SPLIT == 1)
    __syncwarp();
  else
    barrier_sync(1 + in_cta, SHARE);
#pragma unroll
  for (u32 i = 0; i < RESULTS; i++) {
    const u32 at = thread + i * SHARE, token = at / STRIP_ROWS;
    if (token >= min(TOKENS, in.tokens) || row >= matrix.rows) continue;
    Sum sum = 0;
#pragma unroll 8
    for (u32 p = 0; p < parts; p++) sum += sums_of_parts[p * PART + at];
    store_result(out, static_cast<u64>(token) * matrix.rows + row, scaled(sum, factor[i]));
  }
}
