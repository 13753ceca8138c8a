// Many tokens times ternary weights on the int8 tensor cores, from the same bytes as decode.cu: there is no second copy
// of the weights. The codes are made operands in registers, between shared memory and the product.
//
// A CTA makes PREFILL_STRIPS strips x PREFILL_TOKENS tokens; a warp of it STRIPS strips x TILES tiles of 8 tokens. Units come
// through a ring of PREFILL_STAGES stages that all threads fill and empty together. Here a shift makes the codes whole:
// sums kept apart by bit pair would not fit the registers, and one shift serves TILES products.
//
// Here the tokens are A and the weights B: a lane's bytes of a unit are B fragments of two products, rows 0 to 7 and 8 to
// 15, as well as an A fragment of one, and with the weights' rows as columns a lane has results that are neighbours.
//
// Constants: those of ternary/sum.cuh; PREFILL_STRIPS, PREFILL_TOKENS, PREFILL_STAGES; PREFILL_ROW_WARPS and
// PREFILL_TOKEN_WARPS, how the warps of a CTA stand; PREFILL_CTAS, how many of them an SM is to hold.
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"
#include "ternary/results.cuh"

constexpr u32 ROW_WARPS = PREFILL_ROW_WARPS, THREADS = ROW_WARPS * PREFILL_TOKEN_WARPS * WARP;
constexpr u32 STRIPS = PREFILL_STRIPS / ROW_WARPS, TILES = PREFILL_TOKENS / 8 / PREFILL_TOKEN_WARPS;  // of a warp
constexpr u32 X_AT = PREFILL_STRIPS * UNIT_BYTES, SCALES_AT = X_AT + PREFILL_TOKENS * UNIT_COLUMNS;
constexpr u32 STAGE_BYTES = SCALES_AT + PREFILL_STRIPS * GROUPS * STRIP_ROWS * 4;
constexpr u32 OFFSETS_AT = PREFILL_STAGES * STAGE_BYTES;  // after the ring: (2, PREFILL_TOKENS) sums of activations
constexpr u32 SHARERS = ROW_WARPS == 1 ? 1 : 2;           // warps that share the sums of their tokens' activations

static_assert(PREFILL_STRIPS % ROW_WARPS == 0 && PREFILL_TOKENS % (16 * PREFILL_TOKEN_WARPS) == 0, "warps share evenly");

struct Operands {
  const u8* codes;      // (strips, strip_bytes)
  const float* scales;  // (strips, 16), or (strips, groups, 16)
  const u8* x;          // (tokens, columns) int8
  u32 strip_bytes, strips, tokens, columns, units;
  u32 first_strip, first_token;  // of this CTA

  // Starts copying unit `unit` of the CTA's strips and tokens; past the end of either come zeros.
  __device__ __forceinline__ void fetch(u32 unit, u8* stage) const {
#pragma unroll
    for (u32 first = 0; first < PREFILL_STRIPS * WARP; first += THREADS) {
      const u32 piece = first + threadIdx.x, strip = first_strip + piece / WARP;
      if (piece < PREFILL_STRIPS * WARP)
        async_copy(stage + piece * 16, codes + static_cast<u64>(strip) * strip_bytes + unit * UNIT_BYTES + piece % WARP * 16,
                   strip < strips);
    }
#pragma unroll
    for (u32 first = 0; first < PREFILL_TOKENS * X_PIECES; first += THREADS) {
      const u32 piece = first + threadIdx.x, token = piece / X_PIECES, column = unit * UNIT_COLUMNS + piece % X_PIECES * 16;
      if (piece < PREFILL_TOKENS * X_PIECES)
        async_copy(stage + X_AT + x_piece_at(token, piece % X_PIECES),
                   x + static_cast<u64>(first_token + token) * columns + column,
                   first_token + token < tokens && column < columns);
    }
#pragma unroll
    for (u32 first = 0; first < PREFILL_STRIPS * GROUPS * 4; first += THREADS) {
      const u32 piece = first + threadIdx.x, strip = first_strip + piece / (GROUPS * 4 + (GROUPS == 0));
      if (piece < PREFILL_STRIPS * GROUPS * 4)
        async_copy(stage + SCALES_AT + piece * 16,
                   scales + (static_cast<u64>(strip) * units + unit) * GROUPS * STRIP_ROWS + piece % (GROUPS * 4) * 4,
                   strip < strips);
    }
  }
};

// A warp's sums. Product (strip, half, pair) has tokens lane / 4 of tiles 2 * pair and 2 * pair + 1, and rows half * 8 + lane
// % 4 * 2 and + 1 of the strip: [0], [1] are the first tile's, [2], [3] the second's.
struct Sums {
  i32 products[STRIPS][2][TILES / 2][4] = {};
  i32 x[TILES] = {};  // this lane's activations of token lane / 4 of each tile
  float total[GROUP == 0 ? 1 : STRIPS][2][TILES / 2][4] = {};  // with groups: of those that have ended
  u32 row_warp = warp_index() % ROW_WARPS, token_warp = warp_index() / ROW_WARPS;

  __device__ __forceinline__ void add(const u8* stage) {
    const u32 lane = lane_index();
    const uint4* codes = reinterpret_cast<const uint4*>(stage) + row_warp * STRIPS * WARP + lane;
    const u8* mine = stage + X_AT + token_warp * TILES * 8 * UNIT_COLUMNS;
    uint4 w[STRIPS];
#pragma unroll
    for (u32 strip = 0; strip < STRIPS; strip++) w[strip] = codes[strip * WARP];
#pragma unroll
    for (u32 part = 0; part < 2; part++) {  // of the columns
      uint4 v[TILES];
#pragma unroll
      for (u32 tile = 0; tile < TILES; tile++)
        v[tile] = *reinterpret_cast<const uint4*>(mine + x_piece_at(tile * 8 + lane / 4, part * 4 + lane % 4));
      if (GROUP != 0 || row_warp % SHARERS == part % SHARERS) {
#pragma unroll
        for (u32 tile = 0; tile < TILES; tile++)
          x[tile] = add_bytes(v[tile].x, add_bytes(v[tile].y, add_bytes(v[tile].z, add_bytes(v[tile].w, x[tile]))));
      }
#pragma unroll
      for (u32 strip = 0; strip < STRIPS; strip++) {
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
          const u32 shift = 4 * part + 2 * odd, mask = 0x03030303u;
          const u32 low[2] = {w[strip].x >> shift & mask, w[strip].y >> shift & mask};
          const u32 high[2] = {w[strip].z >> shift & mask, w[strip].w >> shift & mask};
#pragma unroll
          for (u32 pair = 0; pair < TILES / 2; pair++) {
            const uint4 a = v[2 * pair], b = v[2 * pair + 1];
#pragma unroll
            for (u32 half = 0; half < 2; half++)
              mma_s8u8(products[strip][half][pair], odd ? a.z : a.x, odd ? b.z : b.x, odd ? a.w : a.y, odd ? b.w : b.y,
                       low[half], high[half]);
          }
        }
      }
      if (GROUP == 64 || (GROUP == 128 && part == 1)) add_group(stage, GROUP == 64 ? part : 0);
    }
  }

  // Ends a group: adds its terms to the totals.
  __device__ __forceinline__ void add_group(const u8* stage, u32 group) {
    const float* scales = reinterpret_cast<const float*>(stage + SCALES_AT) + lane_index() % 4 * 2;
    i32 offset[TILES];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
      offset[tile] = whole(x[tile]);
      x[tile] = 0;
    }
#pragma unroll
    for (u32 strip = 0; strip < (GROUP == 0 ? 1 : STRIPS); strip++)
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const float* mine = scales + ((row_warp * STRIPS + strip) * GROUPS + group) * STRIP_ROWS + half * 8;
        const float scale[2] = {mine[0], mine[1]};
#pragma unroll
        for (u32 pair = 0; pair < TILES / 2; pair++)
#pragma unroll
          for (u32 i = 0; i < 4; i++) {
            i32& product = products[strip][half][pair][i];
            total[strip][half][pair][i] += term(product - offset[2 * pair + i / 2], scale[i % 2]);
            product = 0;
          }
      }
  }

  // The sum over the four lanes that have a token's activations.
  __device__ __forceinline__ static i32 whole(i32 sum) {
    sum += shuffle_xor(sum, 1);
    return sum + shuffle_xor(sum, 2);
  }

  // Without groups: the halves of the units were counted by different warps. shared: (2, PREFILL_TOKENS)
  __device__ __forceinline__ void share(i32* shared) const {
    if (row_warp >= SHARERS) return;
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++) {
      const i32 sum = whole(x[tile]);
      if (lane_index() % 4 == 0)
        shared[row_warp * PREFILL_TOKENS + (token_warp * TILES + tile) * 8 + lane_index() / 4] = sum;
    }
  }

  // A sum of a row, half * 8 + lane % 4 * 2 + odd, with the token of a tile.
  __device__ __forceinline__ void result(float& sum, u32 strip, u32 half, u32 tile, u32 odd, i32) const {
    sum = total[strip][half][tile / 2][tile % 2 * 2 + odd];
  }
  __device__ __forceinline__ void result(i32& sum, u32 strip, u32 half, u32 tile, u32 odd, i32 offset) const {
    sum = products[strip][half][tile / 2][tile % 2 * 2 + odd] - offset;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PREFILL_CTAS) ternary_prefill(
    const u8* codes, const float* scales, const u8* x, const float* inverse, void* out, u32 strip_bytes, u32 rows, u32 tokens,
    u32 columns, u32 result) {
  const u32 strips = (rows + STRIP_ROWS - 1) / STRIP_ROWS, row_tiles = (strips + PREFILL_STRIPS - 1) / PREFILL_STRIPS;
  const Operands in{codes, scales, x, strip_bytes, strips, tokens, columns, strip_bytes / UNIT_BYTES,
                    blockIdx.x % row_tiles * PREFILL_STRIPS, blockIdx.x / row_tiles * PREFILL_TOKENS};
  u8* ring = dynamic_shared();
#pragma unroll
  for (u32 i = 0; i < PREFILL_STAGES - 1; i++) {
    if (i < in.units) in.fetch(i, ring + i * STAGE_BYTES);
    async_copies_commit();
  }
  Sums sums;
  u32 stage = 0, before = PREFILL_STAGES - 1;
#pragma unroll 1
  for (u32 unit = 0; unit < in.units; unit++) {
    async_copies_wait<PREFILL_STAGES - 2>();
    __syncthreads();  // shows all threads the unit, and that all have left the stage that is filled next
    if (unit + PREFILL_STAGES - 1 < in.units) in.fetch(unit + PREFILL_STAGES - 1, ring + before * STAGE_BYTES);
    async_copies_commit();
    sums.add(ring + stage * STAGE_BYTES);
    before = stage;
    stage = stage + 1 == PREFILL_STAGES ? 0 : stage + 1;
  }
  i32* offsets = reinterpret_cast<i32*>(ring + OFFSETS_AT);
  if (GROUP == 0) {
    sums.share(offsets);
    __syncthreads();
  }
  const u32 first_row = (in.first_strip + sums.row_warp * STRIPS) * STRIP_ROWS + lane_index() % 4 * 2;
  float scale[STRIPS * 2][2];  // of rows first_row + 8 * i and the next
#pragma unroll
  for (u32 i = 0; i < STRIPS * 2; i++)
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++)
      scale[i][odd] = GROUP == 0 && first_row + i * 8 + odd < rows ? scales[first_row + i * 8 + odd] : 1.0f;
#pragma unroll
  for (u32 tile = 0; tile < TILES; tile++) {
    const u32 in_cta = (sums.token_warp * TILES + tile) * 8 + lane_index() / 4, token = in.first_token + in_cta;
    if (token >= tokens) continue;
    i32 offset = 0;
    if (GROUP == 0) offset = offsets[in_cta] + (SHARERS == 2 ? offsets[PREFILL_TOKENS + in_cta] : 0);
    const float token_inverse = inverse[token];
    float factor = factor_of(scale[0][0], token_inverse), last = scale[0][0];
    const auto take = [&](u32 i, float (&results)[2]) {
#pragma unroll
      for (u32 odd = 0; odd < 2; odd++) {
        // Rows of one projection have one scale, so a division serves most of them.
        if (scale[i][odd] != last) factor = factor_of(last = scale[i][odd], token_inverse);
        Sum sum;
        sums.result(sum, i / 2, i % 2, tile, odd, offset);
        results[odd] = scaled(sum, factor);
      }
    };
    if (is_gated(result)) {
#pragma unroll
      for (u32 strip = 0; strip < STRIPS; strip++) {
        float gate[2], up[2];
        take(2 * strip, gate);
        take(2 * strip + 1, up);
        const u32 column = (in.first_strip + sums.row_warp * STRIPS + strip) * HALF_STRIP + lane_index() % 4 * 2;
        if (column < rows / 2)
          store_results(out, static_cast<u64>(token) * (rows / 2) + column, gated(result, gate[0], up[0]),
                        gated(result, gate[1], up[1]), true);
      }
      continue;
    }
#pragma unroll
    for (u32 i = 0; i < STRIPS * 2; i++) {
      const u32 row = first_row + i * 8;
      float results[2];
      take(i, results);
      if (row < rows)
        put_results(result, out, static_cast<u64>(token) * rows + row, results[0], results[1], row + 1 < rows);
    }
  }
}
