// The attention phase: QK-norm and RoPE on the new token's heads, its append to the cache, and attention over this CTA's
// part of the cache, in float32 on bf16 keys and values.
//
// A KV head's cache is shared out in blocks of pages (tile/machine.cuh). Earlier positions come through the ring, which
// the producer fills without waiting for this token; the new position comes from shared memory, by the owner of the block
// it lands in. Every warp attends to its own tokens with a running maximum, so warps meet only once, at the end.
#pragma once

#include "ptx/fence.cuh"
#include "tile/machine.cuh"

constexpr u32 HALF_DIM = HEAD_DIM / 2;
constexpr u32 LANE_PAIRS = (HALF_DIM + WARP - 1) / WARP;  // pairs of a head's values that a lane holds

// Warps are split over the heads of a group, so that a lane keeps few query values and as many sums: registers are short.
constexpr u32 MOST_VALUES = 8;
__device__ constexpr u32 head_splits() {
  u32 splits = 1;
  while (splits < MK_WARPS && (GROUP + splits - 1) / splits * LANE_PAIRS * 2 > MOST_VALUES) splits *= 2;
  return splits;
}
constexpr u32 HEAD_SPLITS = head_splits();
constexpr u32 WARP_HEADS = (GROUP + HEAD_SPLITS - 1) / HEAD_SPLITS, TOKEN_WARPS = MK_WARPS / HEAD_SPLITS;

// Tokens of keys, or of values, in one stage of the ring.
constexpr u32 PIECE_TOKENS = PAGE_TOKENS * HEAD_DIM * 2 <= STAGE_BYTES ? PAGE_TOKENS : PAGE_TOKENS / 2;
constexpr u32 PIECE_SLOTS = (PIECE_TOKENS + TOKEN_WARPS - 1) / TOKEN_WARPS;  // of them that one warp attends to
static_assert(PIECE_TOKENS * HEAD_DIM * 2 <= STAGE_BYTES, "a piece of keys fits a stage");
constexpr float NEGATIVE = -1e30f;  // below any score; its exponential is 0, and unlike infinity it subtracts from itself

// Scratch in shared.partial: each warp's merge record of WARP_HEADS heads, then the scores of a piece.
constexpr u32 RECORD = HEAD_DIM + 2;  // sums of values, maximum, sum of weights
constexpr u32 ATTENTION_FLOATS = MK_WARPS * WARP_HEADS * RECORD + MK_WARPS * WARP_HEADS * PIECE_SLOTS;

// Where the keys of one KV head's page begin; its values follow.
__device__ __forceinline__ u64 page_offset(const Launch& launch, u32 layer, u32 head, u32 sequence, u32 page) {
  const u64 number = launch.page_table[sequence * launch.header->table_pages + page];
  return ((static_cast<u64>(layer) * launch.header->num_pages + number) * launch.header->kv_heads + head) *
         (2 * PAGE_TOKENS * HEAD_DIM * 2);
}

// Calls piece(page, first token in it, tokens) for each run of cached positions that `member` owns, in order. Producer and
// consumers both walk this way, so they agree on the ring's stages. False as soon as `piece` says so.
template <class Piece>
__device__ __forceinline__ bool cached_pieces(const Header& header, u32 member, u32 position, Piece piece) {
  const u32 members = kv_chunks(header, position + 1);
  for (u32 block = member; member < members && block < kv_blocks(header, position + 1); block += members) {
    for (u32 page = block * header.block_pages; page < (block + 1) * header.block_pages; page++) {
      for (u32 first = 0; first < PAGE_TOKENS; first += PIECE_TOKENS) {
        const u32 start = page * PAGE_TOKENS + first;
        if (start >= position) return true;
        if (!piece(page, first, min(PIECE_TOKENS, position - start))) return false;
      }
    }
  }
  return true;
}

// One head, one warp: QK-norm if there is any, then RoPE, in place.
__device__ __forceinline__ void norm_and_rotate(const Machine& m, float* head, const float* norm, u32 position, float scale) {
  if (MK_QK_NORM) {
    float squares = 0;
#pragma unroll 1
    for (u32 i = lane_index(); i < HEAD_DIM; i += WARP) squares += head[i] * head[i];
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
    const float factor = rsqrtf(squares / HEAD_DIM + m.header.eps);
#pragma unroll 1
    for (u32 i = lane_index(); i < HEAD_DIM; i += WARP) head[i] *= factor * norm[i];
    __syncwarp();
  }
  const float2* rope = reinterpret_cast<const float2*>(m.launch.constants + m.header.rope) + static_cast<u64>(position) * HALF_DIM;
#pragma unroll 1
  for (u32 i = lane_index(); i < HALF_DIM; i += WARP) {
    const float2 turn = rope[i];
    const float first = head[i], second = head[i + HALF_DIM];
    head[i] = (first * turn.x - second * turn.y) * scale;
    head[i + HALF_DIM] = (second * turn.x + first * turn.y) * scale;
  }
}

// A warp's running attention of WARP_HEADS heads over its tokens.
struct Attention {
  float query[WARP_HEADS][LANE_PAIRS * 2], sum[WARP_HEADS][LANE_PAIRS * 2];
  float maximum[WARP_HEADS], weight[WARP_HEADS];
  u32 first_head, token_warp;
  float* scores;  // (WARP_HEADS, PIECE_SLOTS) of this warp

  __device__ __forceinline__ void start(const Machine& m) {
    first_head = warp_index() % HEAD_SPLITS * WARP_HEADS;
    token_warp = warp_index() / HEAD_SPLITS;
    scores = m.shared.partial + MK_WARPS * WARP_HEADS * RECORD + warp_index() * WARP_HEADS * PIECE_SLOTS;
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      maximum[h] = NEGATIVE;
      weight[h] = 0;
#pragma unroll
      for (u32 j = 0; j < LANE_PAIRS; j++) {
        const u32 pair = lane_index() + j * WARP;
        const bool real = first_head + h < GROUP && pair < HALF_DIM;
        query[h][2 * j] = real ? m.shared.heads[(first_head + h) * HEAD_DIM + 2 * pair] : 0.0f;
        query[h][2 * j + 1] = real ? m.shared.heads[(first_head + h) * HEAD_DIM + 2 * pair + 1] : 0.0f;
        sum[h][2 * j] = sum[h][2 * j + 1] = 0;
      }
    }
  }

  // Scores of one token's key, given as this lane's pairs; all lanes get them.
  __device__ __forceinline__ void score(const float (&key)[LANE_PAIRS * 2], float (&result)[WARP_HEADS]) const {
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      float dot = 0;
#pragma unroll
      for (u32 j = 0; j < LANE_PAIRS * 2; j++) dot += query[h][j] * key[j];
#pragma unroll
      for (u32 mask = WARP / 2; mask > 0; mask /= 2) dot += shuffle_xor(dot, mask);
      result[h] = dot;
    }
  }

  __device__ __forceinline__ void raise(u32 h, float to) {
    const float shrink = __expf(maximum[h] - to);
    maximum[h] = to;
    weight[h] *= shrink;
#pragma unroll
    for (u32 j = 0; j < LANE_PAIRS * 2; j++) sum[h][j] *= shrink;
  }

  __device__ __forceinline__ void add(u32 h, float score, const float (&value)[LANE_PAIRS * 2]) {
    const float share = __expf(score - maximum[h]);
    weight[h] += share;
#pragma unroll
    for (u32 j = 0; j < LANE_PAIRS * 2; j++) sum[h][j] += share * value[j];
  }

  // This lane's pairs of row `token` of a piece, bf16 in shared memory.
  static __device__ __forceinline__ void load(const u8* piece, u32 token, float (&values)[LANE_PAIRS * 2]) {
    const u32* row = reinterpret_cast<const u32*>(piece) + token * HALF_DIM;
#pragma unroll
    for (u32 j = 0; j < LANE_PAIRS; j++) {
      const u32 pair = lane_index() + j * WARP, both = pair < HALF_DIM ? row[pair] : 0;
      values[2 * j] = bf16_low(both);
      values[2 * j + 1] = bf16_high(both);
    }
  }

  __device__ __forceinline__ void keys(const u8* piece, u32 tokens) {
    u32 slot = 0;
#pragma unroll 1
    for (u32 token = token_warp; token < tokens; token += TOKEN_WARPS, slot++) {
      float key[LANE_PAIRS * 2], result[WARP_HEADS];
      load(piece, token, key);
      score(key, result);
      if (lane_index() == 0)
        for (u32 h = 0; h < WARP_HEADS; h++) scores[h * PIECE_SLOTS + slot] = result[h];
    }
    __syncwarp();
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      float best = maximum[h];
#pragma unroll 1
      for (u32 i = 0; i < slot; i++) best = max(best, scores[h * PIECE_SLOTS + i]);
      raise(h, best);
    }
  }

  __device__ __forceinline__ void values(const u8* piece, u32 tokens) {
    u32 slot = 0;
#pragma unroll 1
    for (u32 token = token_warp; token < tokens; token += TOKEN_WARPS, slot++) {
      float value[LANE_PAIRS * 2];
      load(piece, token, value);
#pragma unroll
      for (u32 h = 0; h < WARP_HEADS; h++) add(h, scores[h * PIECE_SLOTS + slot], value);
    }
    __syncwarp();  // the next piece's scores go to the same place
  }

  // The new token, from float32 in shared memory; one warp of each head split calls it.
  __device__ __forceinline__ void newest(const float* key_head, const float* value_head) {
    float key[LANE_PAIRS * 2], value[LANE_PAIRS * 2], result[WARP_HEADS];
#pragma unroll
    for (u32 j = 0; j < LANE_PAIRS; j++) {
      const u32 pair = lane_index() + j * WARP;
      for (u32 i = 0; i < 2; i++) {
        key[2 * j + i] = pair < HALF_DIM ? key_head[2 * pair + i] : 0.0f;
        value[2 * j + i] = pair < HALF_DIM ? value_head[2 * pair + i] : 0.0f;
      }
    }
    score(key, result);
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      raise(h, max(maximum[h], result[h]));
      add(h, result[h], value);
    }
  }

  __device__ __forceinline__ void record(float* records) const {
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      float* mine = records + (warp_index() * WARP_HEADS + h) * RECORD;
#pragma unroll
      for (u32 j = 0; j < LANE_PAIRS; j++) {
        const u32 pair = lane_index() + j * WARP;
        if (pair >= HALF_DIM) continue;
        mine[2 * pair] = sum[h][2 * j];
        mine[2 * pair + 1] = sum[h][2 * j + 1];
      }
      if (lane_index() == 0) {
        mine[HEAD_DIM] = maximum[h];
        mine[HEAD_DIM + 1] = weight[h];
      }
    }
  }
};

// Takes the queries of a KV head, and the new key and value if this CTA appends them, to shared.heads as float32.
__device__ __forceinline__ bool take_heads(const Machine& m, const Task& task, u32 sequence, u32 head, bool appends) {
  const u32 base = task.in_word + sequence * m.header.qkv_words, query_words = GROUP * HALF_DIM;
  const u32 key_base = base + m.header.kv_heads * query_words, value_base = key_base + m.header.kv_heads * HALF_DIM;
  const u32 words = query_words + (appends ? 2 * HALF_DIM : 0);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < words; i += CONSUMERS) {
    u32 word = base + head * query_words + i, pair = 0;
    if (i >= query_words) word = key_base + head * HALF_DIM + i - query_words;
    if (i >= query_words + HALF_DIM) word = value_base + head * HALF_DIM + i - query_words - HALF_DIM;
    if (!m.take_word(word, task.in_phase, pair)) return false;
    m.shared.heads[2 * i] = bf16_low(pair);
    m.shared.heads[2 * i + 1] = bf16_high(pair);
  }
  return true;
}

__device__ __forceinline__ void append(const Machine& m, const Task& task, u32 sequence, u32 head, u32 position) {
  u8* page = m.launch.pages + page_offset(m.launch, task.layer, head, sequence, position / PAGE_TOKENS);
  u32* keys = reinterpret_cast<u32*>(page) + position % PAGE_TOKENS * HALF_DIM;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < 2 * HALF_DIM; i += CONSUMERS) {
    const float* pair = m.shared.heads + GROUP * HEAD_DIM + 2 * i;
    u32* to = i < HALF_DIM ? keys + i : keys + PAGE_TOKENS * HALF_DIM + i - HALF_DIM;
    *to = bf16_pair(pair[0], pair[1]);
  }
  fence_proxy_async_global();  // a later token reads them back with bulk copies
}

__device__ __forceinline__ bool attend(Machine& m, const Task& task, u32 sequence, u32 head) {
  const u32 position = m.position(sequence), members = kv_chunks(m.header, position + 1);
  if (task.member >= members) return true;
  const bool appends = position / PAGE_TOKENS / m.header.block_pages % members == task.member;
  if (!m.meet(take_heads(m, task, sequence, head, appends))) return false;
  const float* norms = m.launch.constants + task.layer * HEAD_DIM;
#pragma unroll 1
  for (u32 h = warp_index(); h < GROUP + (appends ? 1 : 0); h += MK_WARPS)
    norm_and_rotate(m, m.shared.heads + h * HEAD_DIM, norms + (h < GROUP ? m.header.q_norm : m.header.k_norm), position,
                    h < GROUP ? rsqrtf(static_cast<float>(HEAD_DIM)) : 1.0f);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  if (appends) {
    // What is cached is bf16, and so is what this token attends to.
    append(m, task, sequence, head, position);
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  #pragma unroll 1
  for (u32 i = threadIdx.x; i < 2 * HALF_DIM; i += CONSUMERS) {
      float* pair = m.shared.heads + GROUP * HEAD_DIM + 2 * i;
      const u32 rounded = bf16_pair(pair[0], pair[1]);
      pair[0] = bf16_low(rounded);
      pair[1] = bf16_high(rounded);
    }
    barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  }
  Attention attention;
  attention.start(m);
  bool ok = cached_pieces(m.header, task.member, position, [&](u32, u32, u32 tokens) {
    if (!m.ring.take(m.watch, m.at)) return false;
    attention.keys(m.ring.stages + m.at.stage * STAGE_BYTES, tokens);
    m.ring.free(m.at);
    m.at.advance();
    if (!m.ring.take(m.watch, m.at)) return false;
    attention.values(m.ring.stages + m.at.stage * STAGE_BYTES, tokens);
    m.ring.free(m.at);
    m.at.advance();
    return true;
  });
  if (ok && appends && attention.token_warp == position % TOKEN_WARPS)
    attention.newest(m.shared.heads + GROUP * HEAD_DIM, m.shared.heads + (GROUP + 1) * HEAD_DIM);
  attention.record(m.shared.partial);
  if (!m.meet(ok)) return false;
  // Merge the warps' records in their order; then either publish the result, or this member's part of it.
#pragma unroll 1
  for (u32 i = threadIdx.x; i < GROUP * HALF_DIM; i += CONSUMERS) {
    const u32 h = i / HALF_DIM, pair = i % HALF_DIM;
    const float* records = m.shared.partial + (h / WARP_HEADS * WARP_HEADS + h % WARP_HEADS) * RECORD;
    float maximum = NEGATIVE, weight = 0, low = 0, high = 0;
#pragma unroll 4
    for (u32 w = 0; w < TOKEN_WARPS; w++) maximum = max(maximum, records[w * HEAD_SPLITS * WARP_HEADS * RECORD + HEAD_DIM]);
#pragma unroll 4
    for (u32 w = 0; w < TOKEN_WARPS; w++) {
      const float* r = records + w * HEAD_SPLITS * WARP_HEADS * RECORD;
      const float shrink = __expf(r[HEAD_DIM] - maximum);
      weight += shrink * r[HEAD_DIM + 1];
      low += shrink * r[2 * pair];
      high += shrink * r[2 * pair + 1];
    }
    const u32 query_head = head * GROUP + h;
    if (members == 1) {
      const u32 word = m.header.mixed_word + sequence * m.header.mixed_words + query_head * HALF_DIM + pair;
      publish(m.launch.exchange + word, bf16_pair(low / weight, high / weight), m.tag() + 1);  // as combine would
      continue;
    }
    const u32 word = m.header.partial_word + sequence * m.header.partial_words +
                     (query_head * m.header.members + task.member) * RECORD;
    m.give_word(word + 2 * pair, __float_as_uint(low));
    m.give_word(word + 2 * pair + 1, __float_as_uint(high));
    if (pair > 0) continue;
    m.give_word(word + HEAD_DIM, __float_as_uint(maximum));
    m.give_word(word + HEAD_DIM + 1, __float_as_uint(weight));
  }
  // The next head's records and queries go to the same place.
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  return true;
}

__device__ __forceinline__ bool attention_phase(Machine& m, const Task& task) {
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++)
#pragma unroll 1
    for (u32 i = 0; i < task.count; i++)
      if (!attend(m, task, s, task.first + i * task.stride)) return false;
  return true;
}
