// Causal attention of a chunk's queries over the paged cache, keys and values read where they lie (FlashAttention-2,
// Dao, 2023). One CTA for 64 queries of a head, 16 of them a warp, page after page from the sequence's first.
//
// A query's arithmetic is the same whatever else is in its tile or chunk: the pages come in one order, and a page or
// slot that only later queries see adds exact zeros to its sums.
//
// Constants: PF_HEAD_DIM, a multiple of 4; PF_MIXED_FLOAT (1: results are float, 0: bf16).
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/exponent.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"
#include "tile/page.cuh"

constexpr u32 WARPS = 4, THREADS = WARPS * WARP, QUERIES = WARPS * 16;
constexpr u32 PAGE_TOKENS = 64, N_TILES = PAGE_TOKENS / 8;
constexpr u32 PADDED = (PF_HEAD_DIM + 15) / 16 * 16, K_TILES = PADDED / 16;
constexpr u32 STRIDE = PADDED + 8;  // values of a row in shared memory: the 8 rows of a matrix lie in different banks
constexpr u32 TILE = PAGE_TOKENS * STRIDE;
constexpr u32 MINUS_INFINITY = 0xff800000;
constexpr bool KEEP_QUERIES = PADDED <= 128;  // in registers; wider heads read them again for each page

// Starts copying `rows` rows of PF_HEAD_DIM values, the others of the tile become zeros: zero weights times whatever
// lies in a slot that was never written would be NaN. PAGED: they are a page's.
template <bool PAGED>
__device__ __forceinline__ void copy_rows(u16* to, const u16* from, u64 from_stride, u32 rows) {
  if (PF_HEAD_DIM % 8 == 0) {
    constexpr u32 PIECES = PF_HEAD_DIM / 8;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * PIECES; i += THREADS) {
      const u32 row = i / PIECES, piece = i % PIECES, at = PAGED ? page_chunk(PF_HEAD_DIM, row, piece) : piece;
      async_copy(to + row * STRIDE + piece * 8, from + row * from_stride + at * 8, row < rows);
    }
  } else {
    constexpr u32 PIECES = PF_HEAD_DIM / 4;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PAGE_TOKENS * PIECES; i += THREADS) {
      const u32 row = i / PIECES, column = i % PIECES * 4;
      uint2 four = make_uint2(0, 0);
      if (row < rows) four = *reinterpret_cast<const uint2*>(from + row * from_stride + column);
      *reinterpret_cast<uint2*>(to + row * STRIDE + column) = four;
    }
  }
}

// A fragment of the warp's queries: 16 rows x 16 columns.
__device__ __forceinline__ void load_queries(u32 (&a)[4], const u16* queries, u32 k) {
  const u32 lane = lane_index();
  load_matrices(a, queries + (warp_index() * 16 + lane % 16) * STRIDE + k * 16 + lane / 16 * 8);
}

// Scores of 16 queries and a page: c0, c1 are those of row lane / 4 at positions 8 n + 2 * (lane % 4) and the next, c2,
// c3 row lane / 4 + 8.
__device__ __forceinline__ void score(float (&s)[N_TILES][4], const u32 (&kept)[K_TILES][4], const u16* queries,
                                      const u16* keys) {
  const u32 lane = lane_index();
#pragma unroll
  for (u32 k = 0; k < K_TILES; k++) {
    u32 a[4] = {kept[k][0], kept[k][1], kept[k][2], kept[k][3]};
    if (!KEEP_QUERIES) load_queries(a, queries, k);
#pragma unroll
    for (u32 n = 0; n < N_TILES; n += 2) {
      u32 b[4];
      load_matrices(b, keys + (n * 8 + lane / 16 * 8 + lane % 8) * STRIDE + k * 16 + lane / 8 % 2 * 8);
      mma_bf16(s[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(s[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// Makes the scores of positions after the query's minus infinity; `query` is that of row lane / 4.
__device__ __forceinline__ void hide_later(float (&s)[N_TILES][4], u32 first_position, u32 query) {
#pragma unroll
  for (u32 n = 0; n < N_TILES; n++)
#pragma unroll
    for (u32 i = 0; i < 4; i++)
      if (first_position + n * 8 + lane_index() % 4 * 2 + i % 2 > query + i / 2 * 8)
        s[n][i] = __uint_as_float(MINUS_INFINITY);
}

// Adds the page's values, weighted with p.
__device__ __forceinline__ void weigh(float (&out)[PADDED / 8][4], const float (&p)[N_TILES][4], const u16* values) {
  const u32 lane = lane_index();
#pragma unroll
  for (u32 k = 0; k < N_TILES / 2; k++) {
    const float(&low)[4] = p[2 * k];
    const float(&high)[4] = p[2 * k + 1];
    const u32 a[4] = {bf16_pair(low[0], low[1]), bf16_pair(low[2], low[3]), bf16_pair(high[0], high[1]),
                      bf16_pair(high[2], high[3])};
#pragma unroll
    for (u32 n = 0; n < PADDED / 8; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, values + (k * 16 + lane % 16) * STRIDE + n * 8 + lane / 16 * 8);
      mma_bf16(out[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_bf16(out[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_attention(const u16* queries,     // (q_room, heads, PF_HEAD_DIM) bf16
              u32 heads, u32 tokens,
              u32 start,              // position of the first token
              float scale,            // of the scores, times the base-2 logarithm of e
              const i32* page_table,  // (table_pages)
              const u16* pages,       // (pages, kv_heads, 2, PAGE_TOKENS, PF_HEAD_DIM) bf16 of this layer
              u32 kv_heads,
              void* mixed,            // (mixed_room, columns)
              u32 columns) {
  u16* shared_queries = reinterpret_cast<u16*>(dynamic_shared());  // (QUERIES, STRIDE)
  u16* shared_pages = shared_queries + TILE;                       // (2, keys and values, PAGE_TOKENS, STRIDE)
  // The last queries see the most pages: they come first.
  const u32 tiles = (tokens + QUERIES - 1) / QUERIES, first = (tiles - 1 - blockIdx.x / heads) * QUERIES;
  const u32 head = blockIdx.x % heads, kv_head = head / (heads / kv_heads), lane = lane_index();
  const u32 count = min(QUERIES, tokens - first), end = start + tokens;
  const u32 page_count = (start + first + count - 1) / PAGE_TOKENS + 1;
  const u32 query = start + first + warp_index() * 16 + lane / 4;  // and the one 8 after it

  if (PADDED > PF_HEAD_DIM)
    for (u32 i = threadIdx.x; i < 5 * PAGE_TOKENS * (PADDED - PF_HEAD_DIM); i += THREADS)
      shared_queries[i / (PADDED - PF_HEAD_DIM) * STRIDE + PF_HEAD_DIM + i % (PADDED - PF_HEAD_DIM)] = 0;
  const u64 q_stride = static_cast<u64>(heads) * PF_HEAD_DIM;
  copy_rows<false>(shared_queries, queries + first * q_stride + head * PF_HEAD_DIM, q_stride, count);
  auto copy_page = [&](u32 page) {
    const u64 number = static_cast<u32>(page_table[page]);
    const u16* from = pages + (number * kv_heads + kv_head) * 2 * PAGE_TOKENS * PF_HEAD_DIM;
    const u32 filled = min(PAGE_TOKENS, end - page * PAGE_TOKENS);
    u16* to = shared_pages + page % 2 * 2 * TILE;
    copy_rows<true>(to, from, PF_HEAD_DIM, filled);
    copy_rows<true>(to + TILE, from + PAGE_TOKENS * PF_HEAD_DIM, PF_HEAD_DIM, filled);
  };
  copy_page(0);
  async_copies_commit();

  float out[PADDED / 8][4] = {};
  u32 kept[K_TILES][4] = {};
  float best[2] = {__uint_as_float(MINUS_INFINITY), __uint_as_float(MINUS_INFINITY)}, total[2] = {0, 0};
#pragma unroll 1
  for (u32 page = 0; page < page_count; page++) {
    if (page + 1 < page_count) copy_page(page + 1);
    async_copies_commit();
    async_copies_wait<1>();
    __syncthreads();
    if (KEEP_QUERIES && page == 0)
#pragma unroll
      for (u32 k = 0; k < K_TILES; k++) load_queries(kept[k], shared_queries, k);
    const u16* keys = shared_pages + page % 2 * 2 * TILE;
    float s[N_TILES][4] = {};
    score(s, kept, shared_queries, keys);
    if (page * PAGE_TOKENS + PAGE_TOKENS > start + first + warp_index() * 16) hide_later(s, page * PAGE_TOKENS, query);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {  // rows lane / 4 and lane / 4 + 8
      float most = best[half];
#pragma unroll
      for (u32 n = 0; n < N_TILES; n++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) most = max(most, s[n][half * 2 + i]);
      most = max(most, shuffle_xor(most, 1));
      most = max(most, shuffle_xor(most, 2));
      // Exactly 1 if the page has nothing for this query, so that it leaves no trace.
      const float shrink = exp2_approx((best[half] - most) * scale), shift = most * scale;
      best[half] = most;
      total[half] *= shrink;
#pragma unroll
      for (u32 n = 0; n < N_TILES; n++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
          float& value = s[n][half * 2 + i];
          value = exp2_approx(value * scale - shift);
          total[half] += value;
        }
#pragma unroll
      for (u32 n = 0; n < PADDED / 8; n++) {
        out[n][half * 2] *= shrink;
        out[n][half * 2 + 1] *= shrink;
      }
    }
    weigh(out, s, keys + TILE);
    __syncthreads();  // all have left the page's place
  }

#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    total[half] += shuffle_xor(total[half], 1);
    total[half] += shuffle_xor(total[half], 2);
    const u32 token = first + warp_index() * 16 + lane / 4 + half * 8;
    if (token >= tokens) continue;
    const u64 at = static_cast<u64>(token) * columns + head * PF_HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (u32 n = 0; n < PADDED / 8; n++) {
      if (n * 8 + lane % 4 * 2 >= PF_HEAD_DIM) continue;
      const float first = out[n][half * 2] / total[half], second = out[n][half * 2 + 1] / total[half];
      if (PF_MIXED_FLOAT)
        static_cast<float2*>(mixed)[(at + n * 8) / 2] = make_float2(first, second);
      else
        static_cast<u32*>(mixed)[(at + n * 8) / 2] = bf16_pair(first, second);
    }
  }
}
