// The embed phase: every CTA learns the token, and the owners of hidden rows start the residual with its embedding.
#pragma once

#include "phases/embed/table.cuh"

// The token that a sequence goes on with, TOKEN_STOP if the launch ends before it. All lanes of a warp look at one word.
__device__ __forceinline__ u32 next_token(const Machine& m, u32 sequence) {
  if (m.token == 0) return m.launch.first_tokens[sequence];
  // The word carries the tag of the token before.
  const u32 word = m.header.token_word + sequence, want = m.token * m.header.phases;
  u64 got = 0;
  const bool ok = spin(m.watch, Wait::VALUE, word, want, [&](u64& seen) {
    got = load_relaxed_gpu(m.launch.exchange + word);
    seen = got >> 32;
    return seen == want;
  });
  return ok ? static_cast<u32>(got) : TOKEN_STOP;
}

// The CTA's rows of a token's embedding, by one warp: the one that has learnt the token need not meet anybody first.
__device__ __forceinline__ void embed_rows(const Machine& m, const Task& task, u32 sequence, u32 token) {
  const u32 rows = task.count * residual_tile_rows(task.flags), first_row = task.first * residual_tile_rows(task.flags);
#pragma unroll 1
  for (u32 row = forget(threadIdx.x) % WARP * 2; row < rows; row += 2 * WARP) {
    const u32 column = first_row + row;
    const u32 pair = column < m.header.hidden ? *reinterpret_cast<const u32*>(embedding_at(m, token, column)) : 0;
    m.give_word(task.out_word + sequence * m.header.x_words + column / 2, pair);
    *reinterpret_cast<float2*>(m.shared.residual() + sequence * m.header.max_hidden_rows + row) =
        make_float2(bf16_low(pair), bf16_high(pair));
  }
}

// Sets `last` if the launch ends before this token.
__device__ __forceinline__ bool embed_phase(Machine& m, const Task& task, bool& last) {
  // What depends on the position alone comes while the token is awaited, by warps that do not wait for it if there are
  // enough: all layers turn by the same angles, and share out the cache alike. Whoever reads them meets the others before.
  const u32 from_last = CONSUMERS - 1 - forget(threadIdx.x);
  if (from_last < SEQUENCES) m.shared.splits()[from_last] = KvSplit::of(m.header, m.position(from_last));
#pragma unroll 1
  for (u32 i = from_last; i < SEQUENCES * HEAD_DIM; i += CONSUMERS) {
    const u64 row = m.position(i / HEAD_DIM);
    m.shared.rope()[i] = m.launch.constants[m.header.rope + row * HEAD_DIM + i % HEAD_DIM];
  }
#pragma unroll 1
  for (u32 s = forget(threadIdx.x) / WARP; s < SEQUENCES; s += MK_WARPS) {
    const u32 token = next_token(m, s);
    if (s == 0) m.mark(Mark::TAKEN);
    if (!(token & TOKEN_STOP)) embed_rows(m, task, s, token);
    if (forget(threadIdx.x) % WARP == 0) m.shared.words()[WORD_TOKEN + s] = token;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  last = m.shared.words()[WORD_TOKEN] & TOKEN_STOP;
  return true;
}
