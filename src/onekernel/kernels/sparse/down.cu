// The lists of combine.cu times the down projection, with the weights standing still: a CTA keeps DOWN_COLUMNS columns
// of every neuron in shared memory (5,632 x 16 bf16 values are 180 KB) and finishes these columns of every token, so no
// partial sum leaves it.
//
// Entries of a token are the k of a tensor-core product: ldmatrix takes its rows from anywhere, so the gather of weight
// rows costs nothing extra. Columns of the product are eight tokens; the entries of one meet zeros in the others. A lane
// has the values of its column's token for a step of all eight.
//
// Constants: DOWN_WARPS, DOWN_COLUMNS (8 or 16).
#include "ptx/atomic.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "sparse/words.cuh"

constexpr u32 DOWN_PLANES = DOWN_COLUMNS / 8, DOWN_STEP = 32 / DOWN_PLANES, DOWN_TOKENS = 8, DOWN_AHEAD = 4;

// The entry of a step whose row a lane names to ldmatrix: with one plane entry l, with two the lanes 0 to 7 and 16 to 23
// name their rows in one plane, the lanes between them in the other.
__device__ __forceinline__ u32 named() {
  return DOWN_PLANES == 2 ? lane_index() % 8 + lane_index() / 16 * 8 : lane_index();
}

// The values of two neighbouring entries of a list of `length`.
__device__ __forceinline__ u32 values(const u32* list, u32 entry, u32 length) {
  if (entry >= length) return 0;
  const uint2 words = *reinterpret_cast<const uint2*>(list + entry);
  return words.x >> 16 | (entry + 1 < length ? words.y & 0xffff0000u : 0);
}

// Adds a step of one token to its column of the sums.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4* row, const u32 (&value)[DOWN_STEP / 8], bool mine) {
  u32 a[4];
  load_matrices_transposed(a, row);
  if constexpr (DOWN_PLANES == 2) {
    mma_bf16(sum, a[0], a[1], a[2], a[3], mine ? value[0] : 0, mine ? value[1] : 0);
  } else {
    mma_bf16(sum, a[0], 0, a[1], 0, mine ? value[0] : 0, mine ? value[1] : 0);
    mma_bf16(sum, a[2], 0, a[3], 0, mine ? value[2] : 0, mine ? value[3] : 0);
  }
}

// Two columns of one token, from the sums of two tokens in neighbouring lanes, into memory.
__device__ __forceinline__ void store_pair(u32* out, u32 tokens, u32 token, u32 hidden, u32 column, u32 accumulate,
                                           float even_token, float odd_token) {
  const bool odd = lane_index() / 4 % 2;
  const float other = shuffle_xor(odd ? even_token : odd_token, 4);
  float low = odd ? other : even_token, high = odd ? odd_token : other;
  token += odd;
  if (token >= tokens) return;
  u32* to = out + (static_cast<u64>(token) * hidden + column - odd) / 2;
  if (accumulate) {
    low += bf16_low(*to);
    high += bf16_high(*to);
  }
  *to = bf16_pair(low, high);
}

extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32, 1)
    sparse_down(const u32* lists,    // (tokens, room); room is even
                const u32* lengths,  // (tokens,)
                const uint4* down,   // (inner, hidden) bf16
                u32* out,            // (tokens, hidden) bf16
                u32* totals,         // by Total
                u32 tokens, u32 hidden, u32 inner,
                u32 first,       // the neuron that a list's column 0 stands for
                u32 room,        // words of a list at most
                u32 accumulate,  // 1: add to what `out` holds
                u32 parts) {     // shares of the tokens; the grid is parts * slices
  uint4* weights = reinterpret_cast<uint4*>(dynamic_shared());  // (DOWN_PLANES, rows + 1)
  const u32 slices = hidden / DOWN_COLUMNS, slice = blockIdx.x % slices, part = blockIdx.x / slices;
  const u32 rows = inner - first, zero = rows;  // a row of zeros for entries that are none
  for (u32 i = threadIdx.x; i < (rows + 1) * DOWN_PLANES; i += DOWN_WARPS * WARP) {
    const u32 row = i / DOWN_PLANES, plane = i % DOWN_PLANES;
    const u64 from = static_cast<u64>(first + row) * (hidden / 8) + slice * DOWN_PLANES + plane;
    weights[plane * (rows + 1) + row] = row < rows ? down[from] : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const u32 group = lane_index() / 4, t = lane_index() % 4;
  const uint4* plane = weights + (DOWN_PLANES == 2 ? lane_index() / 8 % 2 : 0) * (rows + 1);
  u32 done = 0;
  for (u32 token = (part * DOWN_WARPS + warp_index()) * DOWN_TOKENS; token < tokens;
       token += parts * DOWN_WARPS * DOWN_TOKENS) {
    const u32 mine = token + lane_index() < tokens && lane_index() < DOWN_TOKENS ? lengths[token + lane_index()] : 0;
    u32 most = mine;
#pragma unroll
    for (u32 distance = 1; distance < DOWN_TOKENS; distance *= 2) most = max(most, shuffle_xor(most, distance));
    most = shuffle_index(most, 0);
    const u32 length = shuffle_index(mine, group);
    const u32 *own = lists + static_cast<u64>(token + group) * room, *all = lists + static_cast<u64>(token) * room + named();
    float sum[4] = {};
#pragma unroll 1
    for (u32 entry = 0; entry < most; entry += DOWN_STEP) {
      u32 value[DOWN_STEP / 8];
#pragma unroll
      for (u32 i = 0; i < DOWN_STEP / 8; i++) value[i] = values(own, entry + 8 * i + 2 * t, length);
#pragma unroll 1
      for (u32 half = 0; half < DOWN_TOKENS; half += DOWN_AHEAD) {
        const u32* lists_of = all + half * room + entry;
        u32 lengths_of[DOWN_AHEAD], rows_of[DOWN_AHEAD];  // of several tokens at once: the loads' latency is paid once
#pragma unroll
        for (u32 j = 0; j < DOWN_AHEAD; j++) {
          lengths_of[j] = shuffle_index(mine, half + j);
          rows_of[j] = entry + named() < lengths_of[j] ? word_column(lists_of[j * room]) : zero;
        }
#pragma unroll
        for (u32 j = 0; j < DOWN_AHEAD; j++)
          if (entry < lengths_of[j]) multiply(sum, plane + rows_of[j], value, group == half + j);
      }
    }
    // sum[0], sum[1]: column `group` of tokens 2t and 2t + 1; sum[2], sum[3]: column group + 8.
    const u32 column = slice * DOWN_COLUMNS + group;
    store_pair(out, tokens, token + 2 * t, hidden, column, accumulate, sum[0], sum[1]);
    if constexpr (DOWN_PLANES == 2)
      store_pair(out, tokens, token + 2 * t, hidden, column + 8, accumulate, sum[2], sum[3]);
    done += min(tokens - token, DOWN_TOKENS);
  }
  if (slice == 0 && lane_index() == 0 && done) add_relaxed_gpu(totals + SLICED, done);
}
