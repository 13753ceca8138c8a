// x . up for the active neurons only, with the weights standing still: a CTA keeps one tile of neurons and one slice of
// the hidden size in shared memory, and all tokens pass by.
//
// A gather of up rows reads 2 * hidden bytes of L2 per nonzero (at 5.5 TB/s, 0.75 ns for 2,048); shared memory reads the
// same bytes on all SMs at once, five times as fast and whatever the pattern. The price is a partial sum per slice and
// nonzero, which combine.cu adds up in order.
//
// Eight tokens a warp: row g of the tensor-core product is entry 2s of token g, row g + 8 its entry 2s + 1, column n is
// token n. What is wanted lies on the diagonal; the rest comes free. A sum does not mind the order of k, so lanes load
// 16 consecutive bytes of a weight row and of x alike. Odd groups take the second half of their rows first, and of x: two
// rows of 64 bytes then never meet in a bank, and on the diagonal both sides have the same order.
//
// Constants: UP_WARPS, UP_COLUMNS (a multiple of 64).
#include "ptx/mma.cuh"
#include "sparse/words.cuh"

constexpr u32 UP_VECTORS = UP_COLUMNS / 8, UP_BLOCKS = UP_COLUMNS / 64, UP_TOKENS = 8;

__device__ __forceinline__ void multiply(float (&sum)[4], const uint4& even, const uint4& odd, const uint4& x) {
  mma_bf16(sum, even.x, odd.x, even.y, odd.y, x.x, x.y);
  mma_bf16(sum, even.z, odd.z, even.w, odd.w, x.z, x.w);
}

extern "C" __global__ void __launch_bounds__(UP_WARPS * 32, 1)
    sparse_up(const uint4* x,     // (tokens, hidden) bf16
              const uint4* up,    // (inner, hidden) bf16
              const u32* words,   // (tokens, tiles, capacity), columns counted from `first`; capacity is even
              const u32* counts,  // (tokens, tiles)
              float* partial,     // (slices, tokens, tiles, capacity)
              u32 tokens, u32 hidden, u32 inner, u32 first, u32 tile_columns, u32 tiles, u32 capacity,
              u32 parts) {  // shares of the tokens; the grid is parts * tiles * slices
  uint4* weights = reinterpret_cast<uint4*>(dynamic_shared());  // (tile_columns, UP_VECTORS)
  const u32 slices = hidden / UP_COLUMNS, slice = blockIdx.x % slices;
  const u32 tile = blockIdx.x / slices % tiles, part = blockIdx.x / slices / tiles;
  const u32 offset = tile * tile_columns, begin = first + offset, vectors = hidden / 8;
  const u32 rows = min(tile_columns, inner - begin);
  for (u32 i = threadIdx.x; i < rows * UP_VECTORS; i += UP_WARPS * WARP)
    weights[i] = up[static_cast<u64>(begin + i / UP_VECTORS) * vectors + slice * UP_VECTORS + i % UP_VECTORS];
  __syncthreads();

  const u32 group = lane_index() / 4, t = lane_index() % 4;
  const bool odd = group % 2;
  const u32 one = odd ? t + 4 : t, other = odd ? t : t + 4;  // vectors of a row's block of 64 columns
  for (u32 token = (part * UP_WARPS + warp_index()) * UP_TOKENS + group; token - group < tokens;
       token += parts * UP_WARPS * UP_TOKENS) {
    uint4 x_one[UP_BLOCKS], x_other[UP_BLOCKS];
#pragma unroll
    for (u32 block = 0; block < UP_BLOCKS; block++) {
      const uint4* from = x + static_cast<u64>(token) * vectors + slice * UP_VECTORS + block * 8;
      x_one[block] = token < tokens ? from[one] : make_uint4(0, 0, 0, 0);
      x_other[block] = token < tokens ? from[other] : make_uint4(0, 0, 0, 0);
    }
    const u64 at = static_cast<u64>(token) * tiles + tile;
    const u32 count = token < tokens ? counts[at] : 0;
    u32 most = count;
#pragma unroll
    for (u32 distance = 4; distance < WARP; distance *= 2) most = max(most, shuffle_xor(most, distance));
    const uint2* pairs = reinterpret_cast<const uint2*>(words + at * capacity);
    float2* out = reinterpret_cast<float2*>(partial + (static_cast<u64>(slice) * tokens * tiles + at) * capacity);
    uint2 pair = count > 0 ? pairs[0] : make_uint2(0, 0);
    for (u32 entry = 0; entry < most; entry += 2) {
      const uint2 next = entry + 2 < count ? pairs[entry / 2 + 1] : make_uint2(0, 0);
      const u32 even_row = entry < count ? word_column(pair.x) - offset : 0;
      const u32 odd_row = entry + 1 < count ? word_column(pair.y) - offset : 0;  // else the word means nothing
      float sum[4] = {}, more[4] = {};  // two chains of products, half as long
#pragma unroll
      for (u32 block = 0; block < UP_BLOCKS; block++) {
        const uint4 *even = weights + even_row * UP_VECTORS + block * 8, *uneven = weights + odd_row * UP_VECTORS + block * 8;
        multiply(sum, even[one], uneven[one], x_one[block]);
        multiply(more, even[other], uneven[other], x_other[block]);
      }
      pair = next;
      // Column `group` of rows group and group + 8 is held by the lane whose columns are 2t and 2t + 1.
      if (t == group / 2 && entry < count)
        out[entry / 2] =
            odd ? make_float2(sum[1] + more[1], sum[3] + more[3]) : make_float2(sum[0] + more[0], sum[2] + more[2]);
    }
  }
}
