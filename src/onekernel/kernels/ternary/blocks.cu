// One to eight tokens times ternary weights in the published layout, by four-byte dot products: nothing here is newer
// than sm_80 (weights/ternary/blocks16x32.py, ternary/strip.cuh).
//
// A unit is four blocks of 16 rows x 32 columns. A lane's 16 bytes of it are 16 columns of four rows, so the 16
// activations that it loads serve all four. With one token a mask does: bit pair i keeps its place, and a sum of its own
// for each i is shifted at the end. With more, one shift a word and token-wise sums need fewer registers.
#include "ternary/strip.cuh"

constexpr u32 FIELDS = TOKENS == 1 ? 4 : 1;  // sums kept apart by bit pair

struct Sums {
  i32 sums[FIELDS][TOKENS][4] = {};  // of this lane's columns, for its four rows
  i32 x[TOKENS] = {};

  // Lane l has rows 8 * (l / 4 % 2) + 4 * (l % 2) to + 3, and columns 32 * (l / 8) + 16 * (l / 2 % 2) to + 15.
  __device__ __forceinline__ static u32 first_row() { return lane_index() / 4 % 2 * 8 + lane_index() % 2 * 4; }
  __device__ __forceinline__ static u32 piece() { return lane_index() / 8 * 2 + lane_index() / 2 % 2; }

  // terms: (GROUPS, TOKENS, 16)
  __device__ __forceinline__ void add(const u8* stage, Sum* terms) {
    const uint4 packed = reinterpret_cast<const uint4*>(stage)[lane_index()];
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (u32 token = 0; token < TOKENS; token++) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(stage + X_AT + x_piece_at(token, piece()));
      const u32 v[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        x[token] = add_bytes(v[i], x[token]);
#pragma unroll
        for (u32 row = 0; row < 4; row++) {
          i32& sum = sums[i % FIELDS][token][row];
          const u32 codes = FIELDS == 4 ? words[row] & 0x03030303u << 2 * i : words[row] >> 2 * i & 0x03030303u;
          sum = dp4a_us(codes, v[i], sum);
        }
      }
    }
    if (GROUP == 0) return;
    const float* scales = reinterpret_cast<const float*>(stage + SCALES_AT) + first_row();
    const u32 group = GROUP == 64 ? lane_index() / 16 : 0;  // of this half of the warp
#pragma unroll
    for (u32 token = 0; token < TOKENS; token++) {
#pragma unroll
      for (u32 row = 0; row < 4; row++) {
        i32 sum = take(token, row);
        if (GROUP == 128) sum += shuffle_xor(sum, 16);
        if ((lane_index() & (GROUP == 64 ? 10u : 26u)) == 0)
          terms[group * PART + token * STRIP_ROWS + first_row() + row] = term(sum, scales[group * STRIP_ROWS + row]);
      }
      x[token] = 0;
    }
  }

  // A row's sum over the columns of the lanes of this half of the warp; it starts again from zero. The codes are 1, 2 and
  // 3 for -1, 0 and 1.
  __device__ __forceinline__ i32 take(u32 token, u32 row) {
    i32 sum = -2 * x[token];
#pragma unroll
    for (u32 i = 0; i < FIELDS; i++) {
      sum += sums[i][token][row] >> (FIELDS == 4 ? 2 * i : 0);
      sums[i][token][row] = 0;
    }
    sum += shuffle_xor(sum, 2);
    return sum + shuffle_xor(sum, 8);
  }

  // part: (TOKENS, 16)
  __device__ __forceinline__ void store(Sum* part) {
#pragma unroll
    for (u32 token = 0; token < TOKENS; token++)
#pragma unroll
      for (u32 row = 0; row < 4; row++) {
        i32 sum = take(token, row);
        sum += shuffle_xor(sum, 16);
        if ((lane_index() & 26u) == 0) part[token * STRIP_ROWS + first_row() + row] = sum;
      }
  }
};

extern "C" __global__ void __launch_bounds__(TERNARY_WARPS* WARP) ternary_blocks(
    const u8* codes, const float* scales, const u8* x, const float* inverse, void* out, u32 strip_bytes, u32 rows, u32 tokens,
    u32 columns) {
  multiply<Sums, false>({codes, scales, strip_bytes, rows}, {x, inverse, tokens, columns}, out);
}
