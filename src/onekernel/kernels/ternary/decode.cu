// One to eight tokens times ternary weights on the tensor cores (weights/ternary/tensor_core.py, ternary/strip.cuh).
//
// A lane's 16 bytes of a unit are its A fragments of four products: one AND each, which leaves code * 4^i. A column of B
// is a token, so eight cost what one does. Product i has sums of its own; a last shift makes them equal, exactly: they
// are multiples of 4^i, and 2 * 64 * 128 * 32,768 (a quarter of the largest K) is below 2^31. The codes are 0, 1 and 2
// for -1, 0 and 1, which adds the sum of the activations: the lanes that hold these add them up beside.
#include "ptx/mma.cuh"
#include "ternary/strip.cuh"

struct Sums {
  i32 products[4][4] = {};         // of product i, times 4^i: rows lane / 4 and + 8, tokens lane % 4 * 2 and + 1
  i32 x[GROUP == 64 ? 2 : 1] = {};  // this lane's activations, token lane / 4

  // terms: (GROUPS, TOKENS, 16)
  __device__ __forceinline__ void add(const u8* stage, Sum* terms) {
    const u32 lane = lane_index();
    const uint4 w = reinterpret_cast<const uint4*>(stage)[lane];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      // Columns of B past the last token repeat one: what becomes of them is not stored.
      const uint4 b =
          *reinterpret_cast<const uint4*>(stage + X_AT + x_piece_at(lane / 4 % TOKENS, half * 4 + lane % 4));
      const u32 even = 0x03030303u << 4 * half, odd = even << 2;
      mma_u8s8(products[2 * half], w.x & even, w.y & even, w.z & even, w.w & even, b.x, b.y);
      mma_u8s8(products[2 * half + 1], w.x & odd, w.y & odd, w.z & odd, w.w & odd, b.z, b.w);
      i32& sum = x[GROUP == 64 ? half : 0];
      sum = add_bytes(b.x, add_bytes(b.y, add_bytes(b.z, add_bytes(b.w, sum))));
    }
    if (GROUP == 0) return;
    const float* scales = reinterpret_cast<const float*>(stage + SCALES_AT) + lane / 4;
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
      i32 sum[4];
      take(sum, GROUP == 64 ? 2 * group : 0, GROUP == 64 ? 2 : 4, x[GROUP == 64 ? group : 0]);
      const float scale[2] = {scales[group * STRIP_ROWS], scales[group * STRIP_ROWS + 8]};
#pragma unroll
      for (u32 i = 0; i < 4; i++) put(terms + group * PART, i, term(sum[i], scale[i / 2]));
    }
  }

  // Stores what this lane has of a part at its row and token.
  template <class T>
  __device__ __forceinline__ static void put(Sum* part, u32 i, T value) {
    const u32 token = lane_index() % 4 * 2 + i % 2;
    if (token < TOKENS) part[token * STRIP_ROWS + lane_index() / 4 + i / 2 * 8] = value;
  }

  // The sums of `count` products from `first` on, without what the codes' offset added; they start again from zero.
  __device__ __forceinline__ void take(i32 (&sum)[4], u32 first, u32 count, i32& x_sum) {
    x_sum += shuffle_xor(x_sum, 1);
    x_sum += shuffle_xor(x_sum, 2);
    const u32 token_lane = lane_index() % 4 * 8;
    const i32 offset[2] = {shuffle_index(x_sum, token_lane), shuffle_index(x_sum, token_lane + 4)};
    x_sum = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      sum[i] = -offset[i % 2];
#pragma unroll
      for (u32 product = 0; product < 4; product++) {
        if (product < first || product >= first + count) continue;
        sum[i] += products[product][i] >> 2 * product;
        products[product][i] = 0;
      }
    }
  }

  // part: (TOKENS, 16)
  __device__ __forceinline__ void store(Sum* part) {
    i32 sum[4];
    take(sum, 0, 4, x[0]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) put(part, i, sum[i]);
  }
};

extern "C" __global__ void __launch_bounds__(TERNARY_WARPS* WARP) ternary_decode(
    const u8* codes, const float* scales, const u8* x, const float* inverse, void* out, u32 strip_bytes, u32 rows, u32 tokens,
    u32 columns) {
  multiply<Sums, true>({codes, scales, strip_bytes, rows}, {x, inverse, tokens, columns}, out);
}
