// What the gathering kernels of training share: one row stays with the CTA, rows that belong to the set bits of a mask are
// gathered, and every thread has the same few columns of all of them.
//
// Both weights and tokens are read once per active value: a batch of rows is on its way into shared memory while the one
// before is used, first for dot products, then for the sums that these decide about. A thread reads only what it copied
// itself, so copies need no barrier; the dot products need one per batch.
//
// Constants: TRAIN_HIDDEN (a multiple of 8), TRAIN_THREADS, TRAIN_VECTORS, TRAIN_BATCH (1, 2 or 4), TRAIN_GATED,
// TRAIN_SQUARE.
#pragma once

#include "ptx/copy.cuh"
#include "sparse/gradients.cuh"

constexpr u32 TRAIN_WARPS = TRAIN_THREADS / WARP, TRAIN_COLUMNS = TRAIN_HIDDEN / 8, TRAIN_SUMS = 16;
static_assert(3 * TRAIN_BATCH <= TRAIN_SUMS && TRAIN_THREADS * TRAIN_VECTORS >= TRAIN_COLUMNS, "sizes of training");

// This thread's columns of one row: vectors threadIdx.x, threadIdx.x + TRAIN_THREADS, ...
struct Row {
  uint4 part[TRAIN_VECTORS];
};

__device__ __forceinline__ u32 column_of(u32 part) { return threadIdx.x + part * TRAIN_THREADS; }

__device__ __forceinline__ Row load_row(const uint4* matrix, u32 row) {
  Row found;
#pragma unroll
  for (u32 i = 0; i < TRAIN_VECTORS; i++)
    found.part[i] = column_of(i) < TRAIN_COLUMNS ? matrix[static_cast<u64>(row) * TRAIN_COLUMNS + column_of(i)]
                                                 : make_uint4(0, 0, 0, 0);
  return found;
}

// float32 sums of a row of the result, as a thread has them.
struct Sums {
  float part[TRAIN_VECTORS][8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (u32 i = 0; i < TRAIN_VECTORS; i++)
#pragma unroll
      for (u32 k = 0; k < 8; k++) part[i][k] = 0.0f;
  }

  __device__ __forceinline__ void add(u32 i, float factor, const uint4& v) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) part[i][k] += factor * __uint_as_float(half_of(v, k) << 16);
  }

  // Into a bf16 matrix, on top of what is there if `accumulate`.
  __device__ __forceinline__ void store(uint4* matrix, u32 row, bool accumulate) {
#pragma unroll
    for (u32 i = 0; i < TRAIN_VECTORS; i++) {
      if (column_of(i) >= TRAIN_COLUMNS) continue;
      uint4* to = matrix + static_cast<u64>(row) * TRAIN_COLUMNS + column_of(i);
      if (accumulate) add(i, 1.0f, *to);
      const float* v = part[i];
      *to = make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
    }
  }
};

// From the dot products x . gate, x . up and grad_out . down, which lanes 3j to 3j + 2 hold.
__device__ __forceinline__ Active differentiate(float dots, u32 j, float l1) {
  const float up = shuffle_index(dots, 3 * j + 1), grad_out = shuffle_index(dots, 3 * j + 2);
  const float first = TRAIN_GATED ? shuffle_index(dots, 3 * j) : up;
  return gradients_of<TRAIN_GATED, TRAIN_SQUARE>(first, up, grad_out, l1);
}

// Of 2 * HALF values a lane keeps one half and adds what its partner has of that: 16 sums cost 16 exchanges in all.
template <u32 HALF>
__device__ __forceinline__ void halve(float (&v)[TRAIN_SUMS]) {
  const bool upper = lane_index() & (2 * HALF);
#pragma unroll
  for (u32 i = 0; i < HALF; i++) {
    const float kept = upper ? v[i + HALF] : v[i], sent = upper ? v[i] : v[i + HALF];
    v[i] = kept + shuffle_xor(sent, 2 * HALF);
  }
}

// Gathers rows of ROWS matrices at once. Shared memory: `TrainingShape.shared` of kernels/sparse_training.py.
template <u32 ROWS>
struct Gather {
  uint4* stages;     // (2, TRAIN_BATCH, ROWS, TRAIN_VECTORS, TRAIN_THREADS)
  u16* list;         // (TRAIN_THREADS * WARP,): set bits of a segment
  float* sums;       // (2, TRAIN_WARPS, TRAIN_SUMS)
  u32* warp_counts;  // (TRAIN_WARPS,)
  const uint4* matrices[ROWS];
  u32 first;  // what the list's 0 stands for

  __device__ __forceinline__ explicit Gather(u8* shared)
      : stages(reinterpret_cast<uint4*>(shared)),
        list(reinterpret_cast<u16*>(stages + 2 * TRAIN_BATCH * ROWS * TRAIN_VECTORS * TRAIN_THREADS)),
        sums(reinterpret_cast<float*>(list + TRAIN_THREADS * WARP)),
        warp_counts(reinterpret_cast<u32*>(sums + 2 * TRAIN_WARPS * TRAIN_SUMS)) {}

  __device__ __forceinline__ uint4* stage(u32 slot, u32 j, u32 row, u32 i) const {
    return stages + (((slot * TRAIN_BATCH + j) * ROWS + row) * TRAIN_VECTORS + i) * TRAIN_THREADS + threadIdx.x;
  }

  // Lists the set bits of a segment of a mask, words [begin, begin + TRAIN_THREADS), ascending; returns how many.
  __device__ __forceinline__ u32 collect(const u32* mask, u32 begin, u32 end) {
    const u32 word = begin + threadIdx.x;
    u32 bits = word < end ? mask[word] : 0, in_warp;
    u32 slot = warp_prefix(__popc(bits), in_warp);
    __syncthreads();  // the list before has been used
    if (lane_index() == 0) warp_counts[warp_index()] = in_warp;
    __syncthreads();
    u32 total = 0;
    for (u32 warp = 0; warp < TRAIN_WARPS; warp++) {
      if (warp == warp_index()) slot += total;
      total += warp_counts[warp];
    }
    for (; bits; bits &= bits - 1) list[slot++] = static_cast<u16>(threadIdx.x * WARP + __ffs(bits) - 1);
    first = begin * WARP;
    __syncthreads();
    return total;
  }

  // Starts the copies of a batch; of entries that are none come zeros.
  __device__ __forceinline__ void issue(u32 slot, u32 entry, u32 count) const {
    if (entry < count) {
#pragma unroll
      for (u32 j = 0; j < TRAIN_BATCH; j++) {
        const bool valid = entry + j < count;
        const u64 row = valid ? first + list[entry + j] : 0;
#pragma unroll
        for (u32 r = 0; r < ROWS; r++)
#pragma unroll
          for (u32 i = 0; i < TRAIN_VECTORS; i++)
            async_copy(stage(slot, j, r, i), matrices[r] + row * TRAIN_COLUMNS + column_of(i),
                       valid && column_of(i) < TRAIN_COLUMNS);
      }
    }
    async_copies_commit();
  }

  // Adds each of 16 values over all threads of the CTA, in an order that is always the same; lane l gets sum l % 16.
  __device__ __forceinline__ float sum(float (&v)[TRAIN_SUMS], u32 slot) const {
    halve<8>(v);
    halve<4>(v);
    halve<2>(v);
    halve<1>(v);
    v[0] += shuffle_xor(v[0], 1);
    float* to = sums + slot * TRAIN_WARPS * TRAIN_SUMS;  // the other slot's sums may still be read
    if (lane_index() % 2 == 0) to[warp_index() * TRAIN_SUMS + lane_index() / 2] = v[0];
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (u32 warp = 0; warp < TRAIN_WARPS; warp++) total += to[warp * TRAIN_SUMS + lane_index() % TRAIN_SUMS];
    return total;
  }
};
