// Where a token's embedding lies: in rows of its own, or in the packed head that it is tied to.
#pragma once

#include "ptx/opaque.cuh"
#include "ptx/stream.cuh"
#include "tile/machine.cuh"

// Two neighbouring values, from an even column on.
__device__ __forceinline__ const u8* embedding_at(const Machine& m, u32 token, u32 column) {
  const u8* table = m.launch.weights + m.header.embedding;
  if (!m.header.embed_packed) return table + (static_cast<u64>(token) * m.header.hidden + column) * 2;
  const u32 rows = m.header.embed_rows_4 ? 4 : 8, columns = m.header.embed_rows_4 ? 128 : 64;
  const u64 unit = static_cast<u64>(token / rows) * m.header.embed_units + column / columns;
  const u32 c = column % 64, row = token % rows + column % columns / 64 * 4;
  const u32 place = ((c % 16 / 8 * 8 + row) * 4 + c / 16) * 8 + c % 8;
  return table + unit * UNIT_BYTES + place * 2;
}

// One warp asks L2 for a token's embedding. In 64 columns of the packed head it is two pieces of 64 bytes.
__device__ __forceinline__ void prefetch_embedding(const Machine& m, u32 token) {
  if (token >= m.header.vocab_limit) return;
#pragma unroll 1
  for (u32 i = forget(threadIdx.x) % WARP; i * 16 < m.header.hidden; i += WARP)
    prefetch(embedding_at(m, token, m.header.embed_packed ? i / 4 * 64 + i % 2 * 32 + i % 4 / 2 * 8 : i * 16));
}
