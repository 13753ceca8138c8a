// A small persistent kernel that proves the device layer: `phases` matrix-vector products, each needing the whole
// result of the one before, token after token. y = W x on the tensor cores, x rounded to bf16 between phases; the last
// phase's result is the first phase's input of the next token.
//
// A CTA is RING_WARPS warps that compute and one that loads. The loader streams the CTA's share of all weights through
// a ring without ever waiting for a value; the consumers take the previous phase's values (tile/tagged.cuh), multiply,
// and publish their rows. W lies in tiles of 8 rows x 64 columns in fragment order (onekernel/weights/dense.py), row
// tile by row tile, so a CTA's share is one contiguous piece.
//
// Constants: RING_WARPS (that compute), RING_TILES (of each of them in a stage), RING_STAGES.
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/shuffle.cuh"
#include "tile/ring.cuh"
#include "tile/tagged.cuh"

constexpr u32 TILE_ROWS = 8, TILE_COLUMNS = 64, TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2;
constexpr u32 CONSUMERS = RING_WARPS * WARP, STAGE_TILES = RING_WARPS * RING_TILES;
constexpr u32 STAGE_BYTES = STAGE_TILES * TILE_BYTES;
constexpr u32 CONSUMER_BARRIER = 1;

using WeightRing = Ring<RING_STAGES, STAGE_BYTES, RING_WARPS>;
using WeightProducer = Producer<RING_STAGES, STAGE_BYTES, RING_WARPS>;

// What one CTA does in one phase.
struct Task {
  const u8* weights;      // (row_tiles, k_tiles) tiles
  u32 first_row;          // of its rows
  u32 row_tiles, k_tiles;
  u32 inputs;             // values to take, a multiple of 8
};

// The shared memory after the ring, in this order.
struct Work {
  Task* tasks;     // (phases)
  u32* x;          // (columns / 2): pairs of bf16, in the order of store_x
  float* partial;  // (RING_WARPS, rows of the CTA)
};

__device__ __forceinline__ void load_weights(WeightProducer producer, const Watch& watch, const Task* tasks, u32 phases,
                                             u32 tokens) {
  bool ok = true;
  for (u32 token = 0; ok && token < tokens; token++) {
    for (u32 p = 0; ok && p < phases; p++) {
      const u8* source = tasks[p].weights;
      const u8* end = source + tasks[p].row_tiles * tasks[p].k_tiles * TILE_BYTES;
      for (; ok && source < end; source += STAGE_BYTES)
        ok = producer.fill(watch, source, min(STAGE_BYTES, static_cast<u32>(end - source)));
    }
  }
  producer.drain();
}

// Where a warp is in the CTA's row-major sequence of tiles.
struct Place {
  u32 row_tile, k_tile;

  __device__ __forceinline__ bool row_ends(u32 k_tiles) const { return k_tile + RING_WARPS >= k_tiles; }
  __device__ __forceinline__ void advance(u32 k_tiles) {
    for (k_tile += RING_WARPS; k_tile >= k_tiles; k_tile -= k_tiles) row_tile++;
  }
};

// Puts the words (two values each) 2 * pair and 2 * pair + 1 of the inputs into the shared x. A tile's 32 words lie
// there so that lane 4 * s + t, s = 0 or 1, finds in 16 consecutive bytes what it multiplies: words 8 * t + 2 * i + s,
// i < 4.
__device__ __forceinline__ void store_x(u32* x, u32 pair, u32 even, u32 odd) {
  u32* word = x + pair / 16 * (TILE_COLUMNS / 2) + pair % 16;
  word[0] = even;
  word[16] = odd;
}

// The same value, out of a shuffle. Without it the compiler reads threadIdx anew in every round, 20 cycles each time.
__device__ __forceinline__ u32 kept(u32 value) { return shuffle_index(value, lane_index()); }

// Multiplies the CTA's rows with x. Tile i of the CTA's sequence belongs to warp i % RING_WARPS, so all warps work
// whatever the shape. Within a row tile a warp then holds the sum over the columns k with equal
// (k / TILE_COLUMNS) % RING_WARPS: which warp that is depends on the share, the sum and its place in `partial` do not.
//
// The 16 bytes that a lane loads are a whole A fragment: the tile's 8 rows with half of the columns take its rows 0 to
// 7, the same 8 rows with the other half its rows 8 to 15. Column 0 of B holds the x of the first half, column 1 that
// of the second, so c[0] of column 0 and c[3] of column 1 are the two parts of a row's sum; both are in lane 4 * row.
//
// `ok` is false for a thread that gave up a wait. It waits no more, but goes through all stages with its warp: only the
// CTA's barrier may part them, and the result is dropped there.
__device__ __forceinline__ bool multiply(WeightRing& ring, Cursor<RING_STAGES>& at, const Watch& watch,
                                         const Task& task, const Work& work, bool ok) {
  const u32 lane = kept(lane_index()), warp = kept(warp_index()), k_tiles = task.k_tiles;
  const u32 tiles = task.row_tiles * k_tiles, rows = task.row_tiles * TILE_ROWS;
  const u8* mine = ring.stages + warp * TILE_BYTES + lane * sizeof(uint4);
  const uint4* x = reinterpret_cast<const uint4*>(work.x) + lane;
  Place place{warp / k_tiles, warp % k_tiles};
  float sum[2][4] = {};
  for (u32 first = warp; first < tiles + warp; first += STAGE_TILES, at.advance()) {
    ok = ok && ring.take(watch, at);
    uint4 a[RING_TILES][2], b[RING_TILES] = {};
    Place next = place;
#pragma unroll
    for (u32 i = 0; i < RING_TILES; i++) {
      if (first + i * RING_WARPS >= tiles) break;
      const u8* tile = mine + at.stage * STAGE_BYTES + i * RING_WARPS * TILE_BYTES;
      a[i][0] = *reinterpret_cast<const uint4*>(tile);
      a[i][1] = *reinterpret_cast<const uint4*>(tile + WARP * sizeof(uint4));
      if (lane < 8) b[i] = x[next.k_tile * 8];
      next.advance(k_tiles);
    }
    ring.free(at, ok);
#pragma unroll
    for (u32 i = 0; i < RING_TILES; i++) {
      if (first + i * RING_WARPS >= tiles) break;
      mma_bf16(sum[0], a[i][0].x, a[i][0].y, a[i][0].z, a[i][0].w, b[i].x, b[i].y);
      mma_bf16(sum[1], a[i][1].x, a[i][1].y, a[i][1].z, a[i][1].w, b[i].z, b[i].w);
      if (place.row_ends(k_tiles)) {
        const u32 at_row = place.k_tile % RING_WARPS * rows + place.row_tile * TILE_ROWS + lane / 4;
        const float total = (sum[0][0] + sum[0][3]) + (sum[1][0] + sum[1][3]);
        if (lane % 4 == 0) work.partial[at_row] = total;
        for (u32 j = 0; j < 4; j++) sum[0][j] = sum[1][j] = 0;
      }
      place.advance(k_tiles);
    }
  }
  return ok;
}

// Sums the warps' partial results, always in the same order, and hands the rows to all CTAs and to the host.
__device__ __forceinline__ void publish_rows(const Task& task, const Work& work, u64* words, u32 tag, float* out) {
  const u32 rows = task.row_tiles * TILE_ROWS, parts = min(task.k_tiles, static_cast<u32>(RING_WARPS));
  for (u32 pair = threadIdx.x; pair < rows / 2; pair += CONSUMERS) {
    float low = 0, high = 0;
    for (u32 part = 0; part < parts; part++) {
      const float2 v = *reinterpret_cast<const float2*>(work.partial + part * rows + pair * 2);
      low += v.x;
      high += v.y;
    }
    publish(words + task.first_row / 2 + pair, bf16_pair(low, high), tag);
    if (out != nullptr) {
      out[task.first_row + pair * 2] = low;
      out[task.first_row + pair * 2 + 1] = high;
    }
  }
}

// Step s = token * phases + phase takes words with tag s + 1 from buffer s % 2 and publishes with tag s + 2 in the
// other. Two buffers are enough: whoever publishes step s + 1 has seen all values of step s, each of which was
// published by a CTA that had taken all it needs of step s - 1, the values it overwrites. A CTA without rows in a step
// takes nothing.
__device__ __forceinline__ void compute(WeightRing ring, const Watch& watch, const Work& work, u32 phases, u32 tokens,
                                        u64* exchange, u32 words, float* out, u32 out_rows) {
  Cursor<RING_STAGES> at;
  for (u32 token = 0; token < tokens; token++) {
    for (u32 p = 0; p < phases; p++) {
      const Task task = work.tasks[p];
      if (task.row_tiles == 0) continue;
      const u32 step = token * phases + p;
      const Pair* in = reinterpret_cast<const Pair*>(exchange + step % 2 * words);
      bool ok = take_pairs<CONSUMERS, 2>(watch, in, task.inputs / 4, step + 1, threadIdx.x,
                                         [&](u32 pair, u32 even, u32 odd) { store_x(work.x, pair, even, odd); });
      // The columns between the inputs and the next whole tile have zero weights, but zero times NaN is NaN.
      const u32 taken = task.inputs / 4, whole = (taken + 15) / 16 * 16;
      for (u32 pair = taken + threadIdx.x; pair < whole; pair += CONSUMERS) store_x(work.x, pair, 0, 0);
      barrier_sync(CONSUMER_BARRIER, CONSUMERS);
      ok = multiply(ring, at, watch, task, work, ok);
      if (barrier_any(CONSUMER_BARRIER, CONSUMERS, !ok)) return;
      float* result = p + 1 == phases ? out + static_cast<u64>(token) * out_rows : nullptr;
      publish_rows(task, work, exchange + (step + 1) % 2 * words, step + 2, result);
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + WARP, 1)
    ring(const i64* table,   // (phases, 4): byte offset in weights, row tiles, column tiles, inputs
         u32 phases,
         const u8* weights,  // (weight_bytes)
         u64* exchange,      // (2, words): zeros, but for the first input in buffer 0 with tag 1
         u32 words,
         float* out,         // (tokens, out_rows)
         u32 tokens, u32 out_rows,
         u32 columns,        // the most column tiles of a phase, times 64
         u32 window,         // stages on their way, 1 to STAGES
         u32* abort, u64* records, u32 max_turns) {
  const Watch watch{abort, records, max_turns};
  u8* shared = dynamic_shared();
  WeightRing ring(shared);
  Work work;
  work.tasks = reinterpret_cast<Task*>(shared + WeightRing::BYTES);
  work.x = reinterpret_cast<u32*>(work.tasks + phases + phases % 2);
  work.partial = reinterpret_cast<float*>(work.x + columns / 2);
  if (threadIdx.x == 0) ring.init();
  for (u32 p = threadIdx.x; p < phases; p += blockDim.x) {
    const i64* phase = table + p * 4;
    const u32 row_tiles = static_cast<u32>(phase[1]), k_tiles = static_cast<u32>(phase[2]);
    const u32 begin = row_tiles * blockIdx.x / gridDim.x, end = row_tiles * (blockIdx.x + 1) / gridDim.x;
    work.tasks[p] = Task{weights + phase[0] + static_cast<u64>(begin) * k_tiles * TILE_BYTES, begin * TILE_ROWS,
                         end - begin, k_tiles, static_cast<u32>(phase[3])};
  }
  for (u32 i = threadIdx.x; i < columns / 2; i += blockDim.x) work.x[i] = 0;
  __syncthreads();
  if (warp_index() < RING_WARPS)
    compute(ring, watch, work, phases, tokens, exchange, words, out, out_rows);
  else if (lane_index() == 0)
    load_weights(WeightProducer{ring, window, {}, {}}, watch, work.tasks, phases, tokens);
}
