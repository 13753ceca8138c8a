// Starts the residual: the embedding of each token, from rows of bf16 or from the packed head it is tied to. One CTA
// for each token.
#include "ptx/convert.cuh"
#include "ptx/platform.cuh"

constexpr u32 THREADS = 256, UNIT_VALUES = 512;

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_embed(const i32* token_ids,  // (room): as many as there are CTAs
          const u8* weights,     // (weight_bytes)
          u64 offset,            // of the embedding
          u32 tile_rows,         // of its units, 4 or 8; 0: plain rows
          u32 k_units,           // of a row tile
          u32 hidden,
          float* residual,       // (residual_room, columns): columns from `hidden` on become zeros
          u32 columns) {
  const u32 id = static_cast<u32>(token_ids[blockIdx.x]);
  const u16* table = reinterpret_cast<const u16*>(weights + offset);
  const u32 unit_columns = tile_rows == 4 ? 128 : 64;
  for (u32 column = threadIdx.x; column < columns; column += THREADS) {
    float value = 0;
    if (column < hidden) {
      u64 at = static_cast<u64>(id) * hidden + column;
      if (tile_rows != 0) {
        const u64 unit = static_cast<u64>(id / tile_rows) * k_units + column / unit_columns;
        const u32 row = id % tile_rows + column % unit_columns / 64 * 4, c = column % 64;
        at = unit * UNIT_VALUES + (c % 16 / 8 * 8 + row) * 32 + c / 16 * 8 + c % 8;
      }
      value = bf16_low(table[at]);
    }
    residual[static_cast<u64>(blockIdx.x) * columns + column] = value;
  }
}
