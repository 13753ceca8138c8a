// Gate activations -> TwELL: a warp reads a row once and writes what is above zero, tile by tile, in the order of columns.
//
// Bound by reading the activations: 16,384 x 5,632 values are 185 MB, 43 us at 4.3 TB/s. A row with a tile that does not
// fit gets counts of 0 and a mark; gather.cu then takes it whole from the activations, so nothing is ever lost.
//
// Constants: PACK_WARPS; PACK_SQUARE: words hold the squares (a feed-forward without a gate has no later place for it).
#include "ptx/atomic.cuh"
#include "sparse/words.cuh"

constexpr u32 PACK_LANE_COLUMNS = 16, PACK_STEP = PACK_LANE_COLUMNS * WARP;

extern "C" __global__ void __launch_bounds__(PACK_WARPS * 32, 4)
    sparse_pack(const uint4* gate,  // (rows, width) bf16; width, first and tile_columns are multiples of 16
                u32* words,         // (rows, tiles, capacity), columns counted from `first`
                u32* counts,        // (rows, tiles)
                u32* overflowed,    // (rows,): 0 or 1
                u32* totals,        // by Total
                u32 rows, u32 width,
                u32 first,  // the columns before it are multiplied densely
                u32 tile_columns, u32 tiles, u32 capacity) {
  u32 packed = 0, overflows = 0;
  for (u32 row = blockIdx.x * PACK_WARPS + warp_index(); row < rows; row += gridDim.x * PACK_WARPS) {
    const uint4* from = gate + static_cast<u64>(row) * (width / 8);
    u32 in_row = 0;
    bool over = false;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u64 at = static_cast<u64>(row) * tiles + tile;
      const u32 begin = first + tile * tile_columns, end = min(begin + tile_columns, width);
      u32 count = 0;
      for (u32 step = begin; step < end; step += PACK_STEP) {
        const u32 column = step + lane_index() * PACK_LANE_COLUMNS;
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (column < end) {
          low = from[column / 8];
          high = from[column / 8 + 1];
        }
        u32 mask = kept_mask(low) | kept_mask(high) << 8, found;
        u32 slot = count + warp_prefix(__popc(mask), found);
        for (; mask; mask &= mask - 1, slot++) {
          const u32 i = __ffs(mask) - 1;
          const float value = __uint_as_float((i < 8 ? half_of(low, i) : half_of(high, i - 8)) << 16);
          if (slot < capacity) words[at * capacity + slot] = word_of(column - first + i, activate<PACK_SQUARE>(value));
        }
        count += found;
      }
      if (lane_index() == 0) counts[at] = count;
      over = over || count > capacity;
      in_row += count;
    }
    if (over) {
      __syncwarp();  // after lane 0's counts
      for (u32 tile = lane_index(); tile < tiles; tile += WARP) counts[static_cast<u64>(row) * tiles + tile] = 0;
    }
    if (lane_index() == 0) overflowed[row] = over;
    packed += over ? 0 : in_row;
    overflows += over;
  }
  if (lane_index() == 0) {
    if (packed) add_relaxed_gpu(totals + PACKED, packed);
    if (overflows) add_relaxed_gpu(totals + OVERFLOWED, overflows);
  }
}
