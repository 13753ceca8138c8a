// The lists of combine.cu times the down projection, with the weights standing still: a CTA keeps DOWN_COLUMNS columns
// of every neuron in shared memory (5,632 x 16 bf16 values are 180 KB) and finishes these columns of every token, so no
// partial sum leaves it.
//
// Entries of a token are the k of a tensor-core product: ldmatrix takes its rows from anywhere, so the gather of weight
// rows costs nothing extra. Columns of the product are eight tokens; the entries of one meet zeros in the others.
//
// Constants: DOWN_WARPS, DOWN_COLUMNS (8 or 16).
#include "ptx/atomic.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "sparse/words.cuh"

constexpr u32 DOWN_PLANES = DOWN_COLUMNS / 8, DOWN_STEP = 32 / DOWN_PLANES, DOWN_TOKENS = 8, DOWN_AHEAD = 4;

// A lane holds one entry of a step, and names its row to ldmatrix: with one plane entry l, with two the entries of lanes
// 0 to 7 and 16 to 23 stand for both planes, and the lanes between them hold the same.
__device__ __forceinline__ u32 held() {
  return DOWN_PLANES == 2 ? lane_index() % 8 + lane_index() / 16 * 8 : lane_index();
}
__device__ __forceinline__ u32 holder(u32 entry) { return DOWN_PLANES == 2 ? entry + entry / 8 * 8 : entry; }

// The values of entries k and k + 1 of a step; zeros in the columns of other tokens.
__device__ __forceinline__ u32 values(u32 word, u32 k, bool mine) {
  const u32 low = shuffle_index(word, holder(k)), high = shuffle_index(word, holder(k + 1));
  return mine ? low >> 16 | (high & 0xffff0000u) : 0;
}

// Adds a step of one token to its column of the sums.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4* plane, u32 word, bool mine) {
  const u32 t = lane_index() % 4;
  u32 a[4];
  load_matrices_transposed(a, plane + word_column(word));
  if constexpr (DOWN_PLANES == 2) {
    mma_bf16(sum, a[0], a[1], a[2], a[3], values(word, 2 * t, mine), values(word, 2 * t + 8, mine));
  } else {
    mma_bf16(sum, a[0], 0, a[1], 0, values(word, 2 * t, mine), values(word, 2 * t + 8, mine));
    mma_bf16(sum, a[2], 0, a[3], 0, values(word, 2 * t + 16, mine), values(word, 2 * t + 24, mine));
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
    sparse_down(const u32* lists,    // (tokens, room)
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
    float sum[4] = {};
#pragma unroll 1
    for (u32 half = 0; half < DOWN_TOKENS; half += DOWN_AHEAD) {
      const u32* list = lists + static_cast<u64>(token + half) * room + held();
      u32 begin[DOWN_AHEAD];  // the first step of several tokens at once: the loads' latency is paid once
#pragma unroll
      for (u32 j = 0; j < DOWN_AHEAD; j++)
        begin[j] = held() < shuffle_index(mine, half + j) ? list[j * room] : zero;
#pragma unroll
      for (u32 j = 0; j < DOWN_AHEAD; j++) {
        const u32 length = shuffle_index(mine, half + j);
        u32 word = begin[j];
#pragma unroll 1
        for (u32 entry = 0; entry < length; entry += DOWN_STEP) {
          const u32 next = entry + DOWN_STEP + held() < length ? list[j * room + entry + DOWN_STEP] : zero;
          multiply(sum, plane, word, group == half + j);
          word = next;
        }
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
