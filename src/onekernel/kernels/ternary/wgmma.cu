// Many tokens times ternary weights by the products of warpgroups (sm_90a), from the same bytes as decode.cu and
// prefill.cu. One scale a row: group sums would need all registers twice.
//
// The weights are a, the activations b: the 16 bytes of a unit that a lane reads are its registers of four products, a shift
// and a mask each. A CTA makes WARPS * WGMMA_STRIPS strips x WGMMA_TOKENS tokens. Activations come in the order of the codes
// (ternary/order.cuh), so what is copied is the operand as it stands. Products of a unit go on while the next one's registers
// are made: a stage of the ring is filled again when its products ended, one barrier after the warpgroup saw it.
//
// Constants: those of ternary/sum.cuh; WGMMA_WARPGROUPS; WGMMA_STRIPS of a warp; WGMMA_TOKENS, 64 or 128; WGMMA_STAGES of the
// ring, of which two are at work; WGMMA_CTAS, how many of them an SM is to hold.
#include "ptx/copy.cuh"
#include "ptx/fence.cuh"
#include "ptx/wgmma.cuh"
#include "ternary/results.cuh"

constexpr u32 WARPS = WGMMA_WARPGROUPS * 4, THREADS = WARPS * WARP, STRIPS = WGMMA_STRIPS, TOKENS = WGMMA_TOKENS;
constexpr u32 ROWS = WARPS * STRIPS * STRIP_ROWS, STAGES = WGMMA_STAGES;
constexpr u32 OPERAND_BYTES = TOKENS * UNIT_COLUMNS, STAGE_BYTES = OPERAND_BYTES + WARPS * STRIPS * UNIT_BYTES;
constexpr u32 ROW_WORDS = ROWS + 4;  // of a token's sums, once all are made

static_assert(GROUP == 0, "one scale a row");
static_assert(STAGES >= 3 && STAGE_BYTES % 1024 == 0, "two stages are at work, and operands begin at a multiple of 1024");

using Fragments = u32[STRIPS][4][4];

struct Tile {
  const u8* codes;  // (strips, strip_bytes)
  const u8* x;      // (tokens, columns) int8, columns whole units in the order of the codes
  u32 strip_bytes, strips, tokens, columns, units;
  u32 first_strip, first_token;
  u8* shared;
  u32 warp = warp_index(), lane = lane_index();
  i32 products[STRIPS][TOKENS / 2] = {};

  __device__ __forceinline__ u8* stage_of(u32 unit) const { return shared + unit % STAGES * STAGE_BYTES; }

  // Starts copying this thread's part of a unit; past the end of strips or tokens come zeros.
  __device__ __forceinline__ void fetch(u32 unit) const {
    u8* stage = stage_of(unit);
    if (unit < units) {
#pragma unroll
      for (u32 i = 0; i < STRIPS; i++) {
        const u32 in_cta = i * WARPS + warp, strip = first_strip + in_cta;
        async_copy(stage + OPERAND_BYTES + in_cta * UNIT_BYTES + lane * 16,
                   codes + static_cast<u64>(strip) * strip_bytes + unit * UNIT_BYTES + lane * 16, strip < strips);
      }
#pragma unroll
      for (u32 first = 0; first < TOKENS * X_PIECES; first += THREADS) {
        const u32 piece = first + threadIdx.x, in_cta = piece / X_PIECES, token = first_token + in_cta;
        if (piece < TOKENS * X_PIECES)
          async_copy(stage + in_cta * UNIT_COLUMNS + (piece % X_PIECES ^ in_cta % 8) * 16,
                     x + static_cast<u64>(token) * columns + unit * UNIT_COLUMNS + piece % X_PIECES * 16, token < tokens);
      }
    }
    async_copies_commit();
  }

  __device__ __forceinline__ void decode(u32 unit, Fragments& a) const {
#pragma unroll
    for (u32 i = 0; i < STRIPS; i++) {
      const uint4 w = *reinterpret_cast<const uint4*>(stage_of(unit) + OPERAND_BYTES + (i * WARPS + warp) * UNIT_BYTES +
                                                      lane * 16);
#pragma unroll
      for (u32 part = 0; part < 4; part++) {
        const u32 shift = 2 * part, mask = 0x03030303u;
        a[i][part][0] = w.x >> shift & mask;
        a[i][part][1] = w.y >> shift & mask;
        a[i][part][2] = w.z >> shift & mask;
        a[i][part][3] = w.w >> shift & mask;
      }
    }
  }

  // Waits until a unit is there for all threads, and all have left the one two before it.
  __device__ __forceinline__ void show() const {
    async_copies_wait<STAGES - 3>();
    fence_proxy_async_shared();
    __syncthreads();
  }

  // Adds a unit's products, and makes the registers of the next one's meanwhile.
  __device__ __forceinline__ void add(u32 unit, Fragments& a, Fragments& next) {
    show();  // the next unit
    hold_all(a);
    wgmma_fence();
    const u8* operand = stage_of(unit);
#pragma unroll
    for (u32 part = 0; part < 4; part++)
#pragma unroll
      for (u32 i = 0; i < STRIPS; i++) wgmma_u8s8(products[i], a[i][part], columns_of(operand, part));
    wgmma_commit();
    fetch(unit + STAGES - 1);
    if (unit + 1 < units) decode(unit + 1, next);
    wgmma_wait<0>();
    hold_all(a);
  }

  __device__ __forceinline__ void hold_all(Fragments& a) {
#pragma unroll
    for (u32 i = 0; i < STRIPS; i++)
#pragma unroll
      for (u32 j = 0; j < 16; j++) hold(a[i][j / 4][j % 4]);
#pragma unroll
    for (u32 i = 0; i < STRIPS; i++)
#pragma unroll
      for (u32 j = 0; j < TOKENS / 2; j++) hold(products[i][j]);
  }

  // Takes the sums through shared memory, so that neighbours in it are neighbours in the result.
  __device__ __forceinline__ void share() {
    async_copies_wait<0>();
    __syncthreads();  // all have left the stages
    i32* sums = reinterpret_cast<i32*>(shared);
#pragma unroll
    for (u32 i = 0; i < STRIPS; i++)
#pragma unroll
      for (u32 j = 0; j < TOKENS / 2; j++) {
        const u32 token = j / 4 * 8 + lane % 4 * 2 + j % 2, row = (i * WARPS + warp) * STRIP_ROWS + j % 4 / 2 * 8 + lane / 4;
        sums[token * ROW_WORDS + row] = products[i][j];
      }
    __syncthreads();
  }
};

// A tile's sums in shared memory, on their way to results.
struct Ready {
  const Tile& tile;
  const float* scales;   // (rows)
  const float* inverse;  // (tokens)
  const i32* x_sums;     // (tokens): what the codes' offset added
  u32 rows, first_row;

  // Two neighbouring rows. Most have one scale, those of a projection: a division then serves both.
  struct Rows {
    u32 row_in_cta;
    float scale, second_scale;
  };

  __device__ __forceinline__ Rows rows_at(u32 row_in_cta) const {
    const u32 row = first_row + row_in_cta;
    const float scale = scales[row];
    return {row_in_cta, scale, row + 1 < rows ? scales[row + 1] : scale};
  }

  __device__ __forceinline__ float2 results(const Rows& pair, u32 in_cta, float token_inverse) const {
    const i32 offset = x_sums[tile.first_token + in_cta];
    const uint2 sums = *reinterpret_cast<const uint2*>(tile.shared + (in_cta * ROW_WORDS + pair.row_in_cta) * 4);
    const float factor = factor_of(pair.scale, token_inverse);
    const float second = pair.second_scale == pair.scale ? factor : factor_of(pair.second_scale, token_inverse);
    return make_float2(scaled(static_cast<i32>(sums.x) - offset, factor), scaled(static_cast<i32>(sums.y) - offset, second));
  }

  __device__ __forceinline__ void put(u32 result, void* out) const {
    constexpr u32 PAIRS = ROWS / 2;
    const u32 row = first_row + threadIdx.x % PAIRS * 2;
    if (row >= rows) return;
    const bool both = row + 1 < rows;
    const Rows pair = rows_at(row - first_row);
#pragma unroll 4
    for (u32 in_cta = threadIdx.x / PAIRS; in_cta < TOKENS; in_cta += THREADS / PAIRS) {
      const u32 token = tile.first_token + in_cta;
      if (token >= tile.tokens) break;
      const float2 found = results(pair, in_cta, inverse[token]);
      put_results(result, out, static_cast<u64>(token) * rows + row, found.x, found.y, both);
    }
  }

  __device__ __forceinline__ void gate(u32 result, void* out) const {
    constexpr u32 PAIRS = ROWS / 4;
    const u32 in_tile = threadIdx.x % PAIRS * 2, column = first_row / 2 + in_tile;
    if (column >= rows / 2) return;
    const u32 row = in_tile / HALF_STRIP * STRIP_ROWS + in_tile % HALF_STRIP;
    const Rows gate_rows = rows_at(row), up_rows = rows_at(row + HALF_STRIP);
#pragma unroll 4
    for (u32 in_cta = threadIdx.x / PAIRS; in_cta < TOKENS; in_cta += THREADS / PAIRS) {
      const u32 token = tile.first_token + in_cta;
      if (token >= tile.tokens) break;
      const float token_inverse = inverse[token];
      const float2 gates = results(gate_rows, in_cta, token_inverse), ups = results(up_rows, in_cta, token_inverse);
      store_results(out, static_cast<u64>(token) * (rows / 2) + column, gated(result, gates.x, ups.x),
                    gated(result, gates.y, ups.y), true);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, WGMMA_CTAS) ternary_wgmma(
    const u8* codes, const float* scales, const u8* x, const float* inverse, const i32* x_sums, void* out, u32 strip_bytes,
    u32 rows, u32 tokens, u32 columns, u32 result) {
  const u32 strips = (rows + STRIP_ROWS - 1) / STRIP_ROWS, row_tiles = (rows + ROWS - 1) / ROWS;
  u8* shared = dynamic_shared();
  shared += (1024 - reinterpret_cast<u64>(shared) % 1024) % 1024;
  const u32 first_row = blockIdx.x % row_tiles * ROWS, first_token = blockIdx.x / row_tiles * TOKENS;
  Tile tile{codes,   x,       strip_bytes,          strips,      tokens, columns, strip_bytes / UNIT_BYTES,
            first_row / STRIP_ROWS, first_token, shared};
#pragma unroll
  for (u32 unit = 0; unit < STAGES - 1; unit++) tile.fetch(unit);
  tile.show();
  Fragments even, odd;
  tile.decode(0, even);
#pragma unroll 1
  for (u32 unit = 0; unit < tile.units; unit += 2) {
    tile.add(unit, even, odd);
    if (unit + 1 < tile.units) tile.add(unit + 1, odd, even);
  }
  tile.share();
  const Ready ready{tile, scales, inverse, x_sums, rows, first_row};
  if (is_gated(result))
    ready.gate(result, out);
  else
    ready.put(result, out);
}
