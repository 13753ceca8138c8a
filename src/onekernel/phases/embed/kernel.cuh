// The embed phase: every CTA learns the token, and the owners of hidden rows start the residual with its embedding.
#pragma once

#include "tile/machine.cuh"

// Two neighbouring values of a token's embedding: from its own rows, or from the packed head it is tied to.
__device__ __forceinline__ u32 embedding_pair(const Machine& m, u32 token, u32 column) {
  const u8* table = m.launch.weights + m.header.embedding;
  if (!m.header.embed_packed)
    return *reinterpret_cast<const u32*>(table + (static_cast<u64>(token) * m.header.hidden + column) * 2);
  const u32 rows = m.header.embed_rows_4 ? 4 : 8, columns = m.header.embed_rows_4 ? 128 : 64;
  const u64 unit = static_cast<u64>(token / rows) * m.header.embed_units + column / columns;
  const u32 c = column % 64, row = token % rows + column % columns / 64 * 4;
  const u32 place = ((c % 16 / 8 * 8 + row) * 4 + c / 16) * 8 + c % 8;
  return *reinterpret_cast<const u32*>(table + unit * UNIT_BYTES + place * 2);
}

// Sets `last` if the launch ends before this token.
__device__ __forceinline__ bool embed_phase(Machine& m, const Task& task, bool& last) {
  if (threadIdx.x < SEQUENCES) {
    const KvSplit split = KvSplit::of(m.header, m.position(threadIdx.x));
    u32 token = m.launch.first_tokens[threadIdx.x];
    if (m.token > 0) {
      // The word carries the tag of the token before.
      const u32 word = m.header.token_word + threadIdx.x, want = m.token * m.header.phases;
      u64 got = 0;
      const bool ok = spin(m.watch, Wait::VALUE, word, want, [&](u64& seen) {
        got = load_relaxed_gpu(m.launch.exchange + word);
        seen = got >> 32;
        return seen == want;
      });
      token = ok ? static_cast<u32>(got) : TOKEN_STOP;
    }
    m.shared.words()[WORD_TOKEN + threadIdx.x] = token;
    m.shared.splits()[threadIdx.x] = split;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  m.mark(Mark::TAKEN);
  last = m.shared.words()[WORD_TOKEN] & TOKEN_STOP;
  if (last) return true;
  // All layers turn by the same angles. Whoever reads them meets the others before.
#pragma unroll 1
  for (u32 i = threadIdx.x; i < SEQUENCES * HEAD_DIM; i += CONSUMERS) {
    const u64 row = m.shared.splits()[i / HEAD_DIM].position;
    m.shared.rope()[i] = m.launch.constants[m.header.rope + row * HEAD_DIM + i % HEAD_DIM];
  }
  const u32 rows = task.count * residual_tile_rows(task.flags), first_row = task.first * residual_tile_rows(task.flags);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < rows / 2 * SEQUENCES; i += CONSUMERS) {
    const u32 sequence = SEQUENCES == 1 ? 0 : i / (rows / 2), row = (i - sequence * (rows / 2)) * 2, column = first_row + row;
    u32 pair = 0;
    if (column < m.header.hidden) pair = embedding_pair(m, m.shared.words()[WORD_TOKEN + sequence], column);
    *reinterpret_cast<float2*>(m.shared.residual() + sequence * m.header.max_hidden_rows + row) =
        make_float2(bf16_low(pair), bf16_high(pair));
    m.give_word(task.out_word + sequence * m.header.x_words + column / 2, pair);
  }
  return true;
}
