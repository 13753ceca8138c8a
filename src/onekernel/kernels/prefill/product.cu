// Activations times a packed matrix: (tokens, K) bf16 rows times the weights of onekernel/weights/dense.py, float sums.
//
// A CTA makes a tile of PF_TOKENS tokens x PF_ROWS weight rows, whole in K: stages of PF_K_UNITS * 64 columns come by
// asynchronous copies, and PF_WARPS_M x PF_WARPS_N warps multiply them. The copies' pieces of 16 bytes are 8
// neighbouring columns of a row in both operands, so both lie in shared memory as units of 8 rows x 64 columns, and
// ldmatrix makes the fragments. It leaves those of A in registers that follow each other, as products want them;
// loading pieces in packed order would need four moves for each product.
//
// Every sum goes over K in one order, 16 columns at a time into one accumulator, whatever the tile: a token's results
// depend neither on how many tokens come with it nor on the variant, and the choice of one is a matter of speed alone.
//
// Constants: PF_TOKENS, PF_ROWS, PF_WARPS_M, PF_WARPS_N, PF_K_UNITS, PF_STAGES, PF_CTAS_PER_SM, PF_ROWS_4.
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"

constexpr u32 THREADS = PF_WARPS_M * PF_WARPS_N * WARP;
constexpr u32 M_TILES = PF_TOKENS / PF_WARPS_M / 16, N_TILES = PF_ROWS / PF_WARPS_N / 8;
constexpr u32 TOKEN_UNITS = PF_TOKENS / 8, ROW_UNITS = PF_ROWS / 8, UNITS = TOKEN_UNITS + ROW_UNITS;
constexpr u32 UNIT_BYTES = 1024, PIECES = 64;  // of 16 bytes in a unit
constexpr u32 STAGE_BYTES = UNITS * PF_K_UNITS * UNIT_BYTES;
constexpr u32 TOKEN_COPIES = TOKEN_UNITS * PF_K_UNITS * PIECES / THREADS;
constexpr u32 ROW_COPIES = ROW_UNITS * PF_K_UNITS * PIECES / THREADS;
static_assert(TOKEN_COPIES * THREADS == TOKEN_UNITS * PF_K_UNITS * PIECES && M_TILES > 0, "all threads copy as much");
static_assert(ROW_COPIES * THREADS == ROW_UNITS * PF_K_UNITS * PIECES && N_TILES > 0, "all threads copy as much");

enum Result : u32 { STORE = 0, ADD = 1, SILU = 2, RELU = 3, RELU2 = 4 };

// Where columns 8 * piece to 8 * piece + 7 of a unit's row lie, of tokens and of weights. Pieces change places, so that
// the 8 rows of a matrix are in different banks, but only inside the 128 bytes that 8 threads copy, and pairs of pieces
// stay together. With weights in the order of tokens, which scatters both, 2,048 tokens took 20.4 ms on an H200 instead of
// 13.5 (docs/findings/prefill.md).
__device__ __forceinline__ u32 token_piece(u32 row, u32 piece) { return row * 128 + (piece ^ row) * 16; }
__device__ __forceinline__ u32 weight_piece(u32 row, u32 piece) {
  return piece % 2 * 512 + row * 64 + (piece / 2 ^ row / 2) * 16;
}

// What a thread copies of every stage: the places of its pieces in memory, without what grows along K.
struct Copies {
  const u8* x;        // (tokens, columns) bf16
  const u8* weights;  // the packed matrix
  u32 k_units;        // of 64 columns
  u32 x_from[TOKEN_COPIES], rows_from[ROW_COPIES];

  // Rows past the last one are copies of it: nothing outside is read, and their results are never stored.
  __device__ __forceinline__ Copies(const u16* tokens_x, u32 columns, u32 tokens, const u8* matrix, u32 units,
                                    u32 row_tiles, u32 first_token, u32 first_row)
      : x(reinterpret_cast<const u8*>(tokens_x)), weights(matrix), k_units(units) {
#pragma unroll
    for (u32 n = 0; n < TOKEN_COPIES; n++) {
      const u32 i = threadIdx.x + n * THREADS, token = first_token + i / PIECES % TOKEN_UNITS * 8 + i / 8 % 8;
      x_from[n] = min(token, tokens - 1) * columns * 2 + i % 8 * 16;
    }
#pragma unroll
    for (u32 n = 0; n < ROW_COPIES; n++) {
      const u32 i = threadIdx.x + n * THREADS, tile = first_row / 8 + i / PIECES % ROW_UNITS;
      if (PF_ROWS_4) {  // rows 4 to 7 of a unit here are those of the next row tile, in the same quarter of its unit
        const u32 from = min(tile * 2 + i / 16 % 2, row_tiles - 1) * (k_units / 2) * UNIT_BYTES;
        rows_from[n] = from + i / 32 % 2 * 512 + i % 16 * 16;
      } else {
        rows_from[n] = min(tile, row_tiles - 1) * k_units * UNIT_BYTES + i % PIECES * 16;
      }
    }
  }

  __device__ __forceinline__ void start(u8* stage, u32 first_unit) const {
#pragma unroll
    for (u32 n = 0; n < TOKEN_COPIES; n++) {
      const u32 i = threadIdx.x + n * THREADS, unit = i / PIECES % TOKEN_UNITS, k = i / PIECES / TOKEN_UNITS;
      u8* to = stage + (k * UNITS + unit) * UNIT_BYTES + token_piece(i / 8 % 8, i % 8);
      if (PF_K_UNITS == 1 || first_unit + k < k_units) async_copy(to, x + x_from[n] + (first_unit + k) * 128, true);
    }
#pragma unroll
    for (u32 n = 0; n < ROW_COPIES; n++) {
      const u32 i = threadIdx.x + n * THREADS, unit = i / PIECES % ROW_UNITS, k = i / PIECES / ROW_UNITS;
      const u32 at = first_unit + k, along = PF_ROWS_4 ? at / 2 * UNIT_BYTES + at % 2 * 256 : at * UNIT_BYTES;
      u8* to = stage + (k * UNITS + TOKEN_UNITS + unit) * UNIT_BYTES + weight_piece(i / 4 % 8, i % 4 * 2 + i / 32 % 2);
      if (PF_K_UNITS == 1 || at < k_units) async_copy(to, weights + rows_from[n] + along, true);
    }
  }
};

// Adds the products over 64 columns, 16 at a time. x: the warp's first unit of tokens, w: its first of weights.
__device__ __forceinline__ void multiply(float (&sums)[M_TILES][N_TILES][4], const u8* x, const u8* w) {
  const u32 lane = lane_index();
#pragma unroll
  for (u32 pair = 0; pair < 2; pair++) {
    u32 a[2][M_TILES][4];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
      const u8* rows = x + lane / 8 % 2 * UNIT_BYTES + token_piece(lane % 8, pair * 4 + k * 2 + lane / 16);
#pragma unroll
      for (u32 m = 0; m < M_TILES; m++) load_matrices(a[k][m], rows + 2 * m * UNIT_BYTES);
    }
#pragma unroll
    for (u32 n = 0; n < N_TILES; n++) {
      u32 b[4];
      load_matrices(b, w + n * UNIT_BYTES + weight_piece(lane % 8, pair * 4 + lane / 8));
#pragma unroll
      for (u32 k = 0; k < 2; k++)
#pragma unroll
        for (u32 m = 0; m < M_TILES; m++)
          mma_bf16(sums[m][n], a[k][m][0], a[k][m][1], a[k][m][2], a[k][m][3], b[2 * k], b[2 * k + 1]);
    }
  }
}

__device__ __forceinline__ float activate(u32 result, float gate) {
  if (result == SILU) return __fdividef(gate, 1.0f + __expf(-gate));
  const float positive = max(gate, 0.0f);
  return result == RELU ? positive : positive * positive;
}

// Where the results go: rows as they are, or activation(gate) * up of matrices whose tiles hold half gate, half up
// rows.
struct Output {
  float* rows;  // (tokens, rows_columns)
  u16* inner;   // (tokens, inner_columns) bf16
  u32 rows_columns, inner_columns;
  u32 tokens, row_end;
  Result result;

  __device__ __forceinline__ void put(u32 token, u32 row, float first, float second) const {
    if (token >= tokens) return;
    float2* to = reinterpret_cast<float2*>(rows + static_cast<u64>(token) * rows_columns + row);
    if (result == ADD) {
      const float2 before = *to;
      first += before.x;
      second += before.y;
    }
    *to = make_float2(first, second);
  }

  // c: a lane's sums of 16 tokens x 8 rows, biases added. Gate rows and the same up rows are in lanes that differ in
  // one bit; one of the two takes the first token, the other the second. All lanes come.
  __device__ __forceinline__ void put_gated(u32 token, u32 row, const float (&c)[4]) const {
    constexpr u32 PARTNER = PF_ROWS_4 ? 1 : 2;
    const u32 t = lane_index() % 4;
    const bool has_gate = (t & PARTNER) == 0;
    const float first = has_gate ? c[2] : c[0], second = has_gate ? c[3] : c[1];
    const float theirs[2] = {shuffle_xor(first, PARTNER), shuffle_xor(second, PARTNER)};
    const float gate[2] = {has_gate ? c[0] : theirs[0], has_gate ? c[1] : theirs[1]};
    const float up[2] = {has_gate ? theirs[0] : c[2], has_gate ? theirs[1] : c[3]};
    const u32 column = row / 8 * 4 + (PF_ROWS_4 ? t / 2 : t % 2) * 2, at = token + (has_gate ? 0 : 8);
    if (at >= tokens || row >= row_end) return;
    u32* to = reinterpret_cast<u32*>(inner + static_cast<u64>(at) * inner_columns + column);
    *to = bf16_pair(activate(result, gate[0]) * up[0], activate(result, gate[1]) * up[1]);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, PF_CTAS_PER_SM)
    prefill_product(const u16* x,            // (x_room, columns) bf16: columns past the matrix's own hold zeros
            u32 columns, u32 tokens,
            const u8* weights,       // (weight_bytes)
            u64 offset,              // of the matrix
            u32 k_units,             // of 64 columns; even if PF_ROWS_4
            u32 row_tiles,
            const float* constants,  // (floats)
            u32 bias,                // 0: none, else where it begins + 1: one value for each packed row
            u32 result,              // a Result
            float* rows,             // (rows_room, rows_columns): STORE and ADD
            u32 rows_columns,
            u16* inner,              // (inner_room, inner_columns): the others
            u32 inner_columns) {
  u8* shared = dynamic_shared();
  const u32 token_tiles = (tokens + PF_TOKENS - 1) / PF_TOKENS;  // the CTAs that run at once share weights
  const u32 first_token = blockIdx.x % token_tiles * PF_TOKENS, first_row = blockIdx.x / token_tiles * PF_ROWS;
  const u32 warp_m = warp_index() % PF_WARPS_M, warp_n = warp_index() / PF_WARPS_M;
  const Copies copies(x, columns, tokens, weights + offset, k_units, row_tiles, first_token, first_row);
  const u32 steps = (k_units + PF_K_UNITS - 1) / PF_K_UNITS;

  float sums[M_TILES][N_TILES][4] = {};
#pragma unroll 1
  for (u32 step = 0; step < PF_STAGES - 1; step++) {
    if (step < steps) copies.start(shared + step * STAGE_BYTES, step * PF_K_UNITS);
    async_copies_commit();
  }
  u32 stage = 0, filled = PF_STAGES - 1;
#pragma unroll 1
  for (u32 step = 0; step < steps; step++) {
    async_copies_wait<PF_STAGES - 2>();
    __syncthreads();  // this stage is there for all, and all have left the one that is filled next
    if (step + PF_STAGES - 1 < steps) copies.start(shared + filled * STAGE_BYTES, (step + PF_STAGES - 1) * PF_K_UNITS);
    async_copies_commit();
    const u8* here = shared + stage * STAGE_BYTES;
#pragma unroll
    for (u32 k = 0; k < PF_K_UNITS; k++) {
      if (PF_K_UNITS > 1 && step * PF_K_UNITS + k >= k_units) break;
      const u8* units = here + k * UNITS * UNIT_BYTES;
      multiply(sums, units + warp_m * M_TILES * 2 * UNIT_BYTES, units + (TOKEN_UNITS + warp_n * N_TILES) * UNIT_BYTES);
    }
    stage = stage + 1 == PF_STAGES ? 0 : stage + 1;
    filled = filled + 1 == PF_STAGES ? 0 : filled + 1;
  }

  const u32 row_end = row_tiles * (PF_ROWS_4 ? 4 : 8);
  const Output output{rows, inner, rows_columns, inner_columns, tokens, row_end, static_cast<Result>(result)};
#pragma unroll
  for (u32 n = 0; n < N_TILES; n++) {
    const u32 row = first_row + (warp_n * N_TILES + n) * 8 + lane_index() % 4 * 2;
    float2 add = make_float2(0, 0);
    if (bias != 0 && row < row_end) add = make_float2(constants[bias - 1 + row], constants[bias + row]);
#pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
      const u32 token = first_token + (warp_m * M_TILES + m) * 16 + lane_index() / 4;
      float(&c)[4] = sums[m][n];
      c[0] += add.x, c[1] += add.y, c[2] += add.x, c[3] += add.y;
      if (result >= SILU) {
        output.put_gated(token, row, c);
      } else if (row < row_end) {
        output.put(token, row, c[0], c[1]);
        output.put(token + 8, row, c[2], c[3]);
      }
    }
  }
}
