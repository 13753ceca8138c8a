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
constexpr u32 PARTS_AT = TERNARY_WARPS * STAGES * STAGE_BYTES;      // after the rings: (strips, parts, TOKENS, 16)
constexpr u32 PART = TOKENS * STRIP_ROWS;
constexpr u32 SHARE = SPLIT * WARP;                   // threads of a strip
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

// One of the warps of a strip.
struct Worker {
  const u8* codes;
  const float* scales;
  u32 strip, part, units, strip_bytes;
  u8* ring;

  __device__ __forceinline__ Worker(const Matrix& matrix)
      : strip(blockIdx.x * STRIPS + warp_index() / SPLIT),
        part(warp_index() % SPLIT),
        units((matrix.strip_bytes + UNIT_BYTES - 1) / UNIT_BYTES),
        strip_bytes(matrix.strip_bytes),
        ring(dynamic_shared() + warp_index() * STAGES * STAGE_BYTES) {
    codes = matrix.codes + static_cast<u64>(strip) * strip_bytes;
    scales = matrix.scales + static_cast<u64>(strip) * STRIP_ROWS * (GROUP == 0 ? 1 : units * GROUPS);
  }

  // Starts copying what unit `unit` needs. What lies past the end of the matrix, or of the activations, is zeros.
  __device__ __forceinline__ void fetch(const Activations& in, u32 unit, u8* stage) const {
    const u32 at = unit * UNIT_BYTES + lane_index() * 16;
    async_copy(stage + lane_index() * 16, codes + at, at < strip_bytes);
#pragma unroll
    for (u32 first = 0; first < TOKENS * X_PIECES; first += WARP) {
      const u32 piece = first + lane_index(), token = piece / X_PIECES, column = unit * UNIT_COLUMNS + piece % X_PIECES * 16;
      if (piece < TOKENS * X_PIECES)
        async_copy_cached(stage + X_AT + x_piece_at(token, piece % X_PIECES),
                          in.x + static_cast<u64>(token) * in.columns + column, token < in.tokens && column < in.columns);
    }
    if (lane_index() < GROUPS * STRIP_ROWS / 4)
      async_copy(stage + SCALES_AT + lane_index() * 16, scales + unit * GROUPS * STRIP_ROWS + lane_index() * 4, true);
  }

  // Where the strip's parts stand: of each warp, or of each group.
  __device__ __forceinline__ Sum* parts() const {
    return reinterpret_cast<Sum*>(dynamic_shared() + PARTS_AT) + warp_index() / SPLIT * part_count() * PART;
  }
  __device__ __forceinline__ u32 part_count() const { return GROUP == 0 ? SPLIT : units * GROUPS; }

  // Calls sums.add(stage, where the unit's terms go) for each of this warp's units, in order.
  template <class Sums>
  __device__ __forceinline__ void read(const Activations& in, Sums& sums) const {
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
      if (part + i * SPLIT < units) fetch(in, part + i * SPLIT, ring + i * STAGE_BYTES);
      async_copies_commit();
    }
    u32 stage = 0, before = STAGES - 1;
#pragma unroll 1
    for (u32 unit = part; unit < units; unit += SPLIT) {
      async_copies_wait<STAGES - 2>();
      __syncwarp();  // shows all lanes the unit, and that all have left the stage that is filled next
      const u32 ahead = unit + (STAGES - 1) * SPLIT;
      if (ahead < units) fetch(in, ahead, ring + before * STAGE_BYTES);
      async_copies_commit();
      sums.add(ring + stage * STAGE_BYTES, parts() + unit * GROUPS * PART);
      before = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }
};

// The whole kernel, for either layout: read, add the parts, scale, store. out: (tokens, rows), the floats' high halves if
// TERNARY_BF16.
template <class Sums>
__device__ __forceinline__ void multiply(const Matrix& matrix, const Activations& in, void* out) {
  const Worker worker(matrix);
  if (worker.strip * STRIP_ROWS >= matrix.rows) return;
  const u32 thread = worker.part * WARP + lane_index(), row = worker.strip * STRIP_ROWS + thread % STRIP_ROWS;
  // Asked for now, so that they are here at the end.
  const float scale = GROUP == 0 ? worker.scales[thread % STRIP_ROWS] : 1.0f;
  float inverse[RESULTS];
#pragma unroll
  for (u32 i = 0; i < RESULTS; i++) {
    const u32 token = (thread + i * SHARE) / STRIP_ROWS;
    inverse[i] = token < in.tokens ? in.inverse[token] : 1.0f;
  }
  Sums sums;
  worker.read(in, sums);
  Sum* parts = worker.parts();
  if (GROUP == 0) sums.store(parts + worker.part * PART);
  if (SPLIT == 1)
    __syncwarp();
  else
    barrier_sync(1 + warp_index() / SPLIT, SHARE);
  const u32 count = worker.part_count();
#pragma unroll
  for (u32 i = 0; i < RESULTS; i++) {
    const u32 at = thread + i * SHARE, token = at / STRIP_ROWS;
    if (token >= min(TOKENS, in.tokens) || row >= matrix.rows) continue;
    Sum sum = 0;
#pragma unroll 8
    for (u32 part = 0; part < count; part++) sum += parts[part * PART + at];
    store_result(out, static_cast<u64>(token) * matrix.rows + row, scaled(sum, scale, inverse[i]));
  }
}
