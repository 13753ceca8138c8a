// The attention phase: QK-norm and RoPE on the new token's heads, its append to the cache, and attention over this CTA's
// part of the cache, in float32 on bf16 keys and values.
//
// A KV head's cache is shared out in blocks of pages (tile/machine.cuh). Earlier positions come through the ring, keys and
// values of a piece in one stage, which the producer fills without waiting for this token: all pieces of a member but the last
// are whole. The new position comes from shared memory, by the owner of the block it lands in. Every warp attends to its own tokens with a running maximum, so
// warps meet only twice: when the heads are ready, and to merge.
#pragma once

#include "ptx/fence.cuh"
#include "tile/machine.cuh"

constexpr u32 HALF_DIM = HEAD_DIM / 2;
constexpr u32 NORM_VALUES = (HEAD_DIM + WARP - 1) / WARP;  // of a head, in each lane of a warp

// GROUP_LANES lanes attend to one token: each holds one or two chunks of 4 values of the head, since registers are short.
// A warp works on WARP_TOKENS tokens at once.
constexpr u32 GROUP_LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32, WARP_TOKENS = WARP / GROUP_LANES;
constexpr u32 HEAD_CHUNKS = HEAD_DIM / 4, CHUNKS = (HEAD_CHUNKS + GROUP_LANES - 1) / GROUP_LANES, LANE_VALUES = CHUNKS * 4;

// Warps are split over the heads of a group, so that a lane keeps few query values and as many sums: registers are short.
constexpr u32 MOST_VALUES = 8;
__device__ constexpr u32 head_splits() {
  u32 splits = 1;
  while (2 * splits <= MK_WARPS && (GROUP + splits - 1) / splits > 1 && (GROUP + splits - 1) / splits * LANE_VALUES > MOST_VALUES)
    splits *= 2;
  return splits;
}
constexpr u32 HEAD_SPLITS = head_splits();
constexpr u32 WARP_HEADS = (GROUP + HEAD_SPLITS - 1) / HEAD_SPLITS, TOKEN_WARPS = MK_WARPS / HEAD_SPLITS;

// Tokens whose keys, and then values, are in one stage of the ring, and those of them that one lane attends to.
__device__ constexpr u32 piece_tokens() {
  u32 tokens = PAGE_TOKENS;
  while (tokens * HEAD_DIM * 4 > STAGE_BYTES) tokens /= 2;
  return tokens;
}
constexpr u32 PIECE_TOKENS = piece_tokens(), PIECE_BYTES = PIECE_TOKENS * HEAD_DIM * 2;
constexpr u32 STEP_TOKENS = TOKEN_WARPS * WARP_TOKENS, STEPS = (PIECE_TOKENS + STEP_TOKENS - 1) / STEP_TOKENS;
static_assert(PIECE_TOKENS >= 8, "copies are multiples of 16 bytes");
// Steps whose scores a lane holds at once.
constexpr u32 BATCH = WARP_HEADS > 2 ? 1 : STEPS < 4 / WARP_HEADS ? STEPS : 4 / WARP_HEADS;
constexpr float NEGATIVE = -1e30f;  // below any score; its exponential is 0, and unlike infinity it subtracts from itself

// Scratch in shared.partial(): each warp's merge record of WARP_HEADS heads.
constexpr u32 RECORD = HEAD_DIM + 2;  // sums of values, maximum, sum of weights
constexpr u32 ATTENTION_FLOATS = MK_WARPS * WARP_HEADS * RECORD;

// Where the keys of one KV head's page begin; its values follow.
__device__ __forceinline__ u64 page_offset(const Launch& launch, u32 layer, u32 head, u32 sequence, u32 page) {
  const u64 number = launch.page_table[sequence * launch.header->table_pages + page];
  return ((static_cast<u64>(layer) * launch.header->num_pages + number) * launch.header->kv_heads + head) *
         (2 * PAGE_TOKENS * HEAD_DIM * 2);
}

// One head, one warp: QK-norm if there is any, then RoPE, in place. A key is rounded to bf16, as the cache holds it.
__device__ __forceinline__ void norm_and_rotate(const Machine& m, u32 sequence, float* head, const float (&norm)[NORM_VALUES],
                                                bool is_key) {
  if (MK_QK_NORM) {
    float squares = 0;
    for (u32 i = lane_index(); i < HEAD_DIM; i += WARP) squares += head[i] * head[i];
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
    const float factor = rsqrtf(squares / HEAD_DIM + m.header.eps);
#pragma unroll
    for (u32 j = 0; j < NORM_VALUES; j++)
      if (lane_index() + j * WARP < HEAD_DIM) head[lane_index() + j * WARP] *= factor * norm[j];
    __syncwarp();
  }
  const float2* rope = reinterpret_cast<const float2*>(m.shared.rope()) + sequence * HALF_DIM;
  const float scale = is_key ? 1.0f : rsqrtf(static_cast<float>(HEAD_DIM));
  for (u32 i = lane_index(); i < HALF_DIM; i += WARP) {
    const float2 turn = rope[i];
    const float first = head[i], second = head[i + HALF_DIM];
    float a = first * turn.x - second * turn.y, b = second * turn.x + first * turn.y;
    if (is_key) {
      const u32 rounded = bf16_pair(a, b);
      a = bf16_low(rounded);
      b = bf16_high(rounded);
    }
    head[i] = a * scale;
    head[i + HALF_DIM] = b * scale;
  }
}

// A lane's running attention of WARP_HEADS heads over its tokens. The lanes of a group hold the same maximum and weight.
struct Attention {
  float sum[WARP_HEADS][LANE_VALUES];
  float maximum[WARP_HEADS], weight[WARP_HEADS];
  u32 first_head, first_token;  // of the step's tokens
  u32 lane;                     // in its group
  const float* queries;         // (GROUP, HEAD_DIM) in shared memory: registers are short

  __device__ __forceinline__ void start(const Machine& m) {
    lane = lane_index() % GROUP_LANES;
    queries = m.shared.heads();
    first_head = warp_index() % HEAD_SPLITS * WARP_HEADS;
    first_token = warp_index() / HEAD_SPLITS * WARP_TOKENS + lane_index() / GROUP_LANES;
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      maximum[h] = NEGATIVE;
      weight[h] = 0;
#pragma unroll
      for (u32 j = 0; j < LANE_VALUES; j++) sum[h][j] = 0;
    }
  }

  // The head's value that is this lane's j-th.
  __device__ __forceinline__ u32 column(u32 j) const { return (j / 4 * GROUP_LANES + lane) * 4 + j % 4; }

  // This lane's values of row `token` of a piece, bf16 in shared memory.
  __device__ __forceinline__ void load(const u8* piece, u32 token, float (&values)[LANE_VALUES]) const {
    const uint2* row = reinterpret_cast<const uint2*>(piece + token * HEAD_DIM * 2);
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
      const u32 chunk = c * GROUP_LANES + lane;
      const uint2 four = chunk < HEAD_CHUNKS ? row[chunk] : make_uint2(0, 0);
      values[4 * c] = bf16_low(four.x);
      values[4 * c + 1] = bf16_high(four.x);
      values[4 * c + 2] = bf16_low(four.y);
      values[4 * c + 3] = bf16_high(four.y);
    }
  }

  // The score of this group's token; all its lanes get it.
  __device__ __forceinline__ float score(u32 h, const float (&key)[LANE_VALUES]) const {
    // A warp with a head too many repeats the last one; nobody reads that.
    const float4* query = reinterpret_cast<const float4*>(queries + min(first_head + h, GROUP - 1) * HEAD_DIM);
    float dot = 0;
#pragma unroll
    for (u32 c = 0; c < CHUNKS; c++) {
      const float4 q = query[min(c * GROUP_LANES + lane, HEAD_CHUNKS - 1)];  // past the end the key is 0
      dot += q.x * key[4 * c] + q.y * key[4 * c + 1] + q.z * key[4 * c + 2] + q.w * key[4 * c + 3];
    }
#pragma unroll
    for (u32 mask = GROUP_LANES / 2; mask > 0; mask /= 2) dot += shuffle_xor(dot, mask);
    return dot;
  }

  __device__ __forceinline__ void raise(u32 h, float to) {
    const float shrink = __expf(maximum[h] - to);
    maximum[h] = to;
    weight[h] *= shrink;
#pragma unroll
    for (u32 j = 0; j < LANE_VALUES; j++) sum[h][j] *= shrink;
  }

  __device__ __forceinline__ void add(u32 h, float score, const float (&value)[LANE_VALUES]) {
    const float share = __expf(score - maximum[h]);
    weight[h] += share;
#pragma unroll
    for (u32 j = 0; j < LANE_VALUES; j++) sum[h][j] += share * value[j];
  }

  // The keys and values of `tokens` tokens. What lies behind them may be anything, NaN included, and is not used.
  __device__ __forceinline__ void piece(const u8* keys, u32 tokens) {
    const u32 first_of_warp = first_token - lane_index() / GROUP_LANES;
#pragma unroll 1
    for (u32 first = 0; first + first_of_warp < tokens; first += BATCH * STEP_TOKENS) {
      float scores[BATCH][WARP_HEADS], best[WARP_HEADS];
#pragma unroll
      for (u32 h = 0; h < WARP_HEADS; h++) best[h] = maximum[h];
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) {
        const u32 token = first + i * STEP_TOKENS + first_token;
        float key[LANE_VALUES];
        load(keys, min(token, PIECE_TOKENS - 1), key);
#pragma unroll
        for (u32 h = 0; h < WARP_HEADS; h++) {
          scores[i][h] = score(h, key);
          if (token < tokens) best[h] = max(best[h], scores[i][h]);
        }
      }
#pragma unroll
      for (u32 h = 0; h < WARP_HEADS; h++) raise(h, best[h]);
#pragma unroll
      for (u32 i = 0; i < BATCH; i++) {
        const u32 token = first + i * STEP_TOKENS + first_token;
        if (token >= tokens) break;
        float value[LANE_VALUES];
        load(keys + PIECE_BYTES, token, value);
#pragma unroll
        for (u32 h = 0; h < WARP_HEADS; h++) add(h, scores[i][h], value);
      }
    }
  }

  // The new token, from float32 in shared memory, by one group of each head split; whole warps call it.
  __device__ __forceinline__ void newest(const float* key_head, const float* value_head, bool mine) {
    float row[LANE_VALUES], score_of[WARP_HEADS];
#pragma unroll
    for (u32 j = 0; j < LANE_VALUES; j++) row[j] = column(j) < HEAD_DIM ? key_head[column(j)] : 0.0f;
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) score_of[h] = score(h, row);
    if (!mine) return;
#pragma unroll
    for (u32 j = 0; j < LANE_VALUES; j++) row[j] = column(j) < HEAD_DIM ? value_head[column(j)] : 0.0f;
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      raise(h, max(maximum[h], score_of[h]));
      add(h, score_of[h], row);
    }
  }

  // Merges the warp's groups and leaves its record.
  __device__ __forceinline__ void record(float* records) {
#pragma unroll
    for (u32 h = 0; h < WARP_HEADS; h++) {
      float best = maximum[h];
#pragma unroll
      for (u32 mask = GROUP_LANES; mask < WARP; mask *= 2) best = max(best, shuffle_xor(best, mask));
      raise(h, best);
      float* mine = records + (warp_index() * WARP_HEADS + h) * RECORD;
#pragma unroll
      for (u32 mask = GROUP_LANES; mask < WARP; mask *= 2) weight[h] += shuffle_xor(weight[h], mask);
#pragma unroll
      for (u32 j = 0; j < LANE_VALUES; j++) {
#pragma unroll
        for (u32 mask = GROUP_LANES; mask < WARP; mask *= 2) sum[h][j] += shuffle_xor(sum[h][j], mask);
        if (lane_index() < GROUP_LANES && column(j) < HEAD_DIM) mine[column(j)] = sum[h][j];
      }
      if (lane_index() == 0) {
        mine[HEAD_DIM] = maximum[h];
        mine[HEAD_DIM + 1] = weight[h];
      }
    }
  }
};

// Brings the queries of a KV head, and the new key and value if this CTA appends them, to shared.heads() as float32,
// normalised and rotated. A warp takes whole heads, so no other need wait for it in between.
__device__ __forceinline__ bool take_heads(const Machine& m, const Task& task, u32 sequence, u32 head, bool appends) {
  const u32 base = task.in_word + sequence * m.header.qkv_words, key = m.header.kv_heads * GROUP;
  bool ok = true;
#pragma unroll 1
  for (u32 h = warp_index(); h < GROUP + (appends ? 2 : 0); h += MK_WARPS) {
    const u32 number = h < GROUP ? head * GROUP + h : key + (h - GROUP) * m.header.kv_heads + head;
    float norm[NORM_VALUES] = {};
    if (MK_QK_NORM && h <= GROUP) {
      const float* norms = m.launch.constants + (h < GROUP ? m.header.q_norm : m.header.k_norm) + task.layer * HEAD_DIM;
#pragma unroll
      for (u32 j = 0; j < NORM_VALUES; j++)
        if (lane_index() + j * WARP < HEAD_DIM) norm[j] = norms[lane_index() + j * WARP];
    }
    float* to = m.shared.heads() + h * HEAD_DIM;
#pragma unroll 1
    for (u32 i = lane_index(); ok && i < HALF_DIM / 2; i += WARP) {
      float low;
      u32 high;
      ok = m.take_two_words(base + number * HALF_DIM + 2 * i, task.in_phase, low, high);
      const u32 first = __float_as_uint(low);
      *reinterpret_cast<float4*>(to + 4 * i) = make_float4(bf16_low(first), bf16_high(first), bf16_low(high), bf16_high(high));
    }
    __syncwarp();
    if (h <= GROUP) norm_and_rotate(m, sequence, to, norm, h == GROUP);
  }
  return ok;
}

// By one warp; the others go on, since only a later token needs it.
__device__ __forceinline__ void append(const Machine& m, const Task& task, u32 sequence, u32 head, u32 position) {
  u8* page = m.launch.pages + page_offset(m.launch, task.layer, head, sequence, position / PAGE_TOKENS);
  u32* keys = reinterpret_cast<u32*>(page) + position % PAGE_TOKENS * HALF_DIM;
#pragma unroll 1
  for (u32 i = lane_index(); i < 2 * HALF_DIM; i += WARP) {
    const float* pair = m.shared.heads() + GROUP * HEAD_DIM + 2 * i;
    u32* to = i < HALF_DIM ? keys + i : keys + PAGE_TOKENS * HALF_DIM + i - HALF_DIM;
    *to = bf16_pair(pair[0], pair[1]);
  }
  fence_proxy_async_global();  // a later token reads them back with bulk copies
}

__device__ __forceinline__ bool attend(Machine& m, const Task& task, u32 sequence, u32 head) {
  const KvSplit split = m.shared.splits()[sequence];
  if (task.member >= split.parts) return true;
  const u32 position = split.position, cached = split.cached(m.header, task.member);
  const bool appends = task.member == split.owner;
  if (!m.meet(take_heads(m, task, sequence, head, appends))) return false;
  m.mark(Mark::TAKEN);
  Attention attention;
  attention.start(m);
  bool ok = true;
#pragma unroll 1
  for (u32 done = 0; done < cached; done += PIECE_TOKENS) {
    ok = m.take_stage();
    if (!ok) break;
    attention.piece(m.ring.stages + m.at.stage * STAGE_BYTES, min(PIECE_TOKENS, cached - done));
    m.ring.free(m.at);
    m.at.advance();
  }
  if (ok && appends && warp_index() / HEAD_SPLITS == position / WARP_TOKENS % TOKEN_WARPS)
    attention.newest(m.shared.heads() + GROUP * HEAD_DIM, m.shared.heads() + (GROUP + 1) * HEAD_DIM,
                     lane_index() / GROUP_LANES == position % WARP_TOKENS);
  attention.record(m.shared.partial());
  m.mark(Mark::MULTIPLIED);
  if (!m.meet(ok)) return false;
  m.mark(Mark::MET);
  if (appends && warp_index() == MK_WARPS - 1) append(m, task, sequence, head, position);
  // Merge the warps' records in their order; then either publish the result, or this member's part of it.
#pragma unroll 1
  for (u32 i = threadIdx.x; i < GROUP * HALF_DIM; i += CONSUMERS) {
    const u32 h = i / HALF_DIM, pair = i % HALF_DIM;
    const float* records = m.shared.partial() + (h / WARP_HEADS * WARP_HEADS + h % WARP_HEADS) * RECORD;
    float maximum = NEGATIVE, weight = 0, low = 0, high = 0;
#pragma unroll 2
    for (u32 w = 0; w < TOKEN_WARPS; w++) maximum = max(maximum, records[w * HEAD_SPLITS * WARP_HEADS * RECORD + HEAD_DIM]);
#pragma unroll 2
    for (u32 w = 0; w < TOKEN_WARPS; w++) {
      const float* r = records + w * HEAD_SPLITS * WARP_HEADS * RECORD;
      const float shrink = __expf(r[HEAD_DIM] - maximum);
      weight += shrink * r[HEAD_DIM + 1];
      low += shrink * r[2 * pair];
      high += shrink * r[2 * pair + 1];
    }
    const u32 query_head = head * GROUP + h;
    if (split.parts == 1) {
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
  return true;
}

__device__ __forceinline__ bool attention_phase(Machine& m, const Task& task) {
  if (task.count == 0) return true;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++)
#pragma unroll 1
    for (u32 i = 0; i < task.count; i++) {
      // The next head's records and queries go to the same place.
      if (s + i > 0) barrier_sync(CONSUMER_BARRIER, CONSUMERS);
      if (!attend(m, task, s, task.first + i * task.stride)) return false;
    }
  // The warp that appends counts what is appended.
  __syncwarp();
  if (threadIdx.x == CONSUMERS - 1) store_release_cta(m.shared.words() + WORD_APPENDED, m.shared.words()[WORD_APPENDED] + 1);
  return true;
}
