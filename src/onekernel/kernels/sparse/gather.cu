// The classical form, a CTA per token: collect the active neurons, read their up rows, then their down rows.
//
// It reads the gate's activations themselves, so it has no capacity and cannot overflow: it is the rescue of the rows
// that pack.cu marks (and ends after a look at the marks if there are none), and the route for few tokens, where moving
// all weights into shared memory would cost as much as a dense product.
//
// Constants: GATHER_WARPS, GATHER_SQUARE, GATHER_GATED.
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "sparse/words.cuh"

constexpr u32 GATHER_THREADS = GATHER_WARPS * WARP, GATHER_CHUNK = GATHER_THREADS * 8;

// What the CTA works with: shared memory of 6 * hidden + 8 * GATHER_CHUNK + 8 * GATHER_WARPS bytes, and the matrices.
struct Gather {
  const uint4* x;     // (tokens, hidden) bf16
  const uint4* gate;  // (tokens, width) bf16
  const uint4* up;    // (inner, hidden) bf16
  const uint4* down;  // (inner, hidden) bf16
  u32* out;           // (tokens, hidden) bf16
  u32 hidden, width, first;
  float* sums;       // (hidden,)
  uint4* row;        // (hidden,) bf16: the token's x
  u32* list;         // (GATHER_CHUNK,): its active neurons
  float* inner;      // (GATHER_CHUNK,): their activations
  u32* warp_counts;  // (GATHER_WARPS,)

  // Collects the chunk's active neurons; returns how many. All threads of the CTA.
  __device__ __forceinline__ u32 collect(const uint4* activations, u32 column) {
    const uint4 v = column < width ? activations[column / 8] : make_uint4(0, 0, 0, 0);
    const u32 mask = kept_mask(v);
    u32 in_warp;
    u32 slot = warp_prefix(__popc(mask), in_warp);
    if (lane_index() == 0) warp_counts[warp_index()] = in_warp;
    __syncthreads();
    u32 total = 0;
    for (u32 warp = 0; warp < GATHER_WARPS; warp++) {
      if (warp == warp_index()) slot += total;
      total += warp_counts[warp];
    }
    for (u32 left = mask; left; left &= left - 1) {
      const u32 i = __ffs(left) - 1;
      list[slot++] = half_of(v, i) << 16 | (column + i);
    }
    __syncthreads();
    return total;
  }

  // activate(gate) * (x . up) of the listed neurons, a warp each, rounded to bf16.
  __device__ __forceinline__ void multiply_up(u32 active) {
    const u32 vectors = hidden / 8;
    for (u32 entry = warp_index(); entry < active; entry += GATHER_WARPS) {
      const u32 word = list[entry];
      float product = activate<GATHER_SQUARE>(word_value(word));
      if constexpr (GATHER_GATED) {
        const uint4* from = up + static_cast<u64>(word_column(word)) * vectors;
        float sum = 0.0f;
#pragma unroll 8
        for (u32 i = lane_index(); i < vectors; i += WARP) sum += dot(row[i], from[i]);
#pragma unroll
        for (u32 distance = WARP / 2; distance > 0; distance /= 2) sum += shuffle_xor(sum, distance);
        product *= sum;
      }
      if (lane_index() == 0) inner[entry] = bf16_high(word_of(0, product));
    }
    __syncthreads();
  }

  // Adds the listed neurons' down rows, eight columns a thread. A heavy token is one CTA's work and nothing else hides
  // the latency of its rows, so eight of them are on their way at once.
  __device__ __forceinline__ void add_down(u32 active) {
    const u32 vectors = hidden / 8;
    for (u32 i = threadIdx.x; i < vectors; i += GATHER_THREADS) {
      float sum[8];
#pragma unroll
      for (u32 k = 0; k < 8; k++) sum[k] = sums[i * 8 + k];
#pragma unroll 8
      for (u32 entry = 0; entry < active; entry++) {
        const uint4 v = down[static_cast<u64>(word_column(list[entry])) * vectors + i];
#pragma unroll
        for (u32 k = 0; k < 8; k++) sum[k] += inner[entry] * __uint_as_float(half_of(v, k) << 16);
      }
#pragma unroll
      for (u32 k = 0; k < 8; k++) sums[i * 8 + k] = sum[k];
    }
    __syncthreads();
  }

  __device__ __forceinline__ void take(u32 token, bool accumulate) {
    const u32 vectors = hidden / 8;
    __syncthreads();  // the row before has been written
    for (u32 i = threadIdx.x; i < vectors; i += GATHER_THREADS) row[i] = x[static_cast<u64>(token) * vectors + i];
    for (u32 i = threadIdx.x; i < hidden; i += GATHER_THREADS) sums[i] = 0.0f;
    const uint4* activations = gate + static_cast<u64>(token) * (width / 8);
    for (u32 chunk = first; chunk < width; chunk += GATHER_CHUNK) {
      const u32 active = collect(activations, chunk + threadIdx.x * 8);
      multiply_up(active);
      add_down(active);
    }
    u32* to = out + static_cast<u64>(token) * (hidden / 2);
    for (u32 i = threadIdx.x; i < hidden / 2; i += GATHER_THREADS) {
      const u32 before = accumulate ? to[i] : 0;
      to[i] = bf16_pair(sums[2 * i] + bf16_low(before), sums[2 * i + 1] + bf16_high(before));
    }
  }
};

extern "C" __global__ void __launch_bounds__(GATHER_WARPS * 32, 1)
    sparse_gather(const uint4* x,         // (tokens, hidden) bf16
                  const uint4* gate,      // (tokens, width) bf16: the gate's activations before ReLU
                  const uint4* up,        // (inner, hidden) bf16
                  const uint4* down,      // (inner, hidden) bf16
                  const u32* overflowed,  // (tokens,): the rows to take
                  u32* out,               // (tokens, hidden) bf16
                  u32* totals,            // by Total
                  u32 tokens, u32 hidden, u32 width, u32 first,
                  u32 all) {  // 1: take every row and overwrite `out`; 0: the marked ones, added to it
  u8* shared = dynamic_shared();
  u32* list = reinterpret_cast<u32*>(shared + hidden * 6);
  float* inner = reinterpret_cast<float*>(list + GATHER_CHUNK);
  u32* warp_counts = reinterpret_cast<u32*>(inner + GATHER_CHUNK);
  u32* marks = warp_counts + GATHER_WARPS;  // (GATHER_WARPS,)
  Gather gather{x,     gate, up, down, out, hidden, width, first, reinterpret_cast<float*>(shared),
                reinterpret_cast<uint4*>(shared + hidden * 4), list, inner, warp_counts};
  u32 taken = 0;
  // A thread looks at one mark: where nothing overflowed, this is a load and a barrier, however many tokens there are.
  for (u32 seen = 0; static_cast<u64>(seen) * gridDim.x < tokens; seen += GATHER_THREADS) {
    const u64 own = blockIdx.x + static_cast<u64>(seen + threadIdx.x) * gridDim.x;
    const bool marked = own < tokens && (all || overflowed[own]);
    if (!barrier_any(1, GATHER_THREADS, marked)) continue;
    const u32 ballot = warp_ballot(marked);
    if (lane_index() == 0) marks[warp_index()] = ballot;
    __syncthreads();
    for (u32 warp = 0; warp < GATHER_WARPS; warp++)
      for (u32 left = marks[warp]; left; left &= left - 1, taken++)
        gather.take(blockIdx.x + (seen + warp * WARP + __ffs(left) - 1) * gridDim.x, !all);
  }
  if (threadIdx.x == 0 && taken) add_relaxed_gpu(totals + GATHERED, taken);
}
