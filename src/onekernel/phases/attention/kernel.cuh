// The attention phase: QK-norm and RoPE on the new token's heads, its append to the cache, and attention over this CTA's
// part of the cache, in float32 on bf16 keys and values.
//
// A KV head's cache is shared out in blocks of pages (tile/machine.cuh). Earlier positions come through the ring, keys and
// values of a piece in one stage, which the producer fills without waiting for this token: all pieces of a member but the last
// are whole. The new position comes from shared memory, by the owner of the block it lands in. Every warp attends to its own
// tokens with a running maximum, so warps meet only twice: when the heads are ready, and to merge.
//
// The phase lies open between two hand-overs: what counts is its latency, so few instructions, each of them seldom waited for.
#pragma once

#include "ptx/divide.cuh"
#include "ptx/exponent.cuh"
#include "ptx/fence.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "tile/machine.cuh"
#include "tile/page.cuh"

constexpr u32 HALF_DIM = HEAD_DIM / 2;  // words of a head, two bf16 values each
constexpr u32 ROW_BYTES = HEAD_DIM * 2;
constexpr u32 TURN_WORDS = HEAD_DIM / 4;                    // RoPE turns word i against word TURN_WORDS + i
constexpr u32 TURNS = (TURN_WORDS + WARP - 1) / WARP;  // of a head, in each lane of a warp

// A warp attends to an octet of tokens at once, for a quad of query heads. Lanes load rows by chunks of 16 bytes.
constexpr u32 OCTET = 8, QUAD = 4, QUADS = (GROUP + QUAD - 1) / QUAD;
constexpr u32 CHUNKS = (HEAD_DIM + 7) / 8, KEY_STEPS = (CHUNKS + 3) / 4, VALUE_CHUNKS = 8;
// Warps are split over quads, and over every 64 values of a head: a lane then has 16 sums, and registers are short.
constexpr u32 VALUE_SPLITS = (CHUNKS + VALUE_CHUNKS - 1) / VALUE_CHUNKS, SPLITS = QUADS * VALUE_SPLITS, TOKEN_WARPS = MK_WARPS / SPLITS;
static_assert(SPLITS <= MK_WARPS, "onekernel/plan/shared.py refuses this");

// Tokens whose keys, and then values, are in one stage of the ring.
__device__ constexpr u32 piece_tokens() {
  u32 tokens = PAGE_TOKENS;
  while (tokens * HEAD_DIM * 4 > STAGE_BYTES) tokens /= 2;
  return tokens;
}
constexpr u32 PIECE_TOKENS = piece_tokens(), PIECE_BYTES = PIECE_TOKENS * ROW_BYTES, PIECE_OCTETS = PIECE_TOKENS / OCTET;
static_assert(PIECE_OCTETS > 0, "copies are multiples of 16 bytes");

// Pieces that different warps work on at once, if a piece has fewer octets than there are warps. A stage must stay with its
// warps (tile/ring.cuh), each of which speaks for as many when it frees one.
__device__ constexpr u32 pieces_at_once() {
  u32 pieces = SPLITS * TOKEN_WARPS < MK_WARPS || TOKEN_WARPS < PIECE_OCTETS ? 1 : TOKEN_WARPS / PIECE_OCTETS;
  while (MK_STAGES % pieces > 0 || TOKEN_WARPS % pieces > 0) pieces--;
  return pieces;
}
constexpr u32 AT_ONCE = pieces_at_once(), OWNERS = TOKEN_WARPS / AT_ONCE;

constexpr float NEGATIVE = -1e30f;  // below any score; its power of two is 0, and unlike infinity it subtracts from itself
constexpr float LOG2_E = 1.4426950408889634f;  // in the queries' scale: powers of two are what the hardware has

// Scratch where products keep their inputs and sums: (TOKEN_WARPS, GROUP) records of a warp's tokens.
constexpr u32 RECORD = HEAD_DIM + 2;  // sums of values, maximum, sum of weights
__device__ __forceinline__ float* records(const Machine& m) { return reinterpret_cast<float*>(m.shared.x()); }

// Where the keys of one KV head's page begin; its values follow.
__device__ __forceinline__ u64 page_offset(const Launch& launch, u32 layer, u32 head, u32 sequence, u32 page) {
  const u64 number = launch.page_table[sequence * launch.header->table_pages + page];
  return ((static_cast<u64>(layer) * launch.header->num_pages + number) * launch.header->kv_heads + head) *
         (2 * PAGE_TOKENS * HEAD_DIM * 2);
}

// Brings the queries of a KV head, and the new key and value if this CTA appends them, to shared.heads(), normalised and
// rotated. A warp takes whole heads, so no other need wait for it in between; a lane has words that turn against each other.
__device__ __forceinline__ bool take_heads(const Machine& m, const Task& task, u32 sequence, u32 head, bool appends) {
  const u32 want = m.tag_of(task.in_phase), lane = forget(lane_index());
  bool ok = true;
#pragma unroll 1
  for (u32 h = warp_index(); h < GROUP + (appends ? 2 : 0); h += MK_WARPS) {
    const u32 number = h < GROUP ? head * GROUP + h : h * m.header.kv_heads + head;
    const u32 word = task.in_word + sequence * m.header.qkv_words + number * HALF_DIM;
    const bool normed = MK_QK_NORM && h <= GROUP;
    float2 norm[TURNS][2] = {};
#pragma unroll
    for (u32 j = 0; normed && j < TURNS; j++) {
      const float* norms = m.launch.constants + (h < GROUP ? m.header.q_norm : m.header.k_norm) + task.layer * HEAD_DIM;
#pragma unroll
      for (u32 half = 0; half < 2; half++)
        norm[j][half] = reinterpret_cast<const float2*>(norms)[min(lane + j * WARP, TURN_WORDS - 1) + half * TURN_WORDS];
    }
    u32 taken[TURNS][2] = {};
    ok = spin(m.watch, Wait::VALUE, word + lane, want, [&](u64& seen) {
      u64 got[TURNS][2];
      bool ready = true;
#pragma unroll
      for (u32 j = 0; j < TURNS; j++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
          got[j][half] = load_relaxed_gpu(m.launch.exchange + word + min(lane + j * WARP, TURN_WORDS - 1) + half * TURN_WORDS);
#pragma unroll
      for (u32 j = 0; j < TURNS; j++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          taken[j][half] = static_cast<u32>(got[j][half]);
          if (got[j][half] >> 32 == want) continue;
          ready = false;
          seen = got[j][half] >> 32;
        }
      return ready;
    }) && ok;
    __syncwarp();
    float factor = 1;
    if (normed) {
      float squares = 0;
#pragma unroll
      for (u32 j = 0; j < TURNS; j++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
          const float low = bf16_low(taken[j][half]), high = bf16_high(taken[j][half]);
          if (lane + j * WARP < TURN_WORDS) squares += low * low + high * high;
        }
#pragma unroll
      for (u32 mask = WARP / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
      factor = rsqrtf(squares / HEAD_DIM + m.header.eps);
    }
    const float scale = h < GROUP ? LOG2_E * rsqrtf(static_cast<float>(HEAD_DIM)) : 1.0f;
#pragma unroll
    for (u32 j = 0; j < TURNS; j++) {
      const u32 at = lane + j * WARP;
      if (at >= TURN_WORDS) break;
      u32* to = m.shared.heads() + h * HALF_DIM + at;
      if (h > GROUP) {  // the value
        to[0] = taken[j][0];
        to[TURN_WORDS] = taken[j][1];
        continue;
      }
      float2 a = make_float2(bf16_low(taken[j][0]), bf16_high(taken[j][0]));
      float2 b = make_float2(bf16_low(taken[j][1]), bf16_high(taken[j][1]));
      if (normed) {
        a = make_float2(a.x * (factor * norm[j][0].x), a.y * (factor * norm[j][0].y));
        b = make_float2(b.x * (factor * norm[j][1].x), b.y * (factor * norm[j][1].y));
      }
      const float4 turn = reinterpret_cast<const float4*>(m.shared.rope() + sequence * HEAD_DIM)[at];
      const float turned[4] = {(a.x * turn.x - b.x * turn.y) * scale, (a.y * turn.z - b.y * turn.w) * scale,
                               (b.x * turn.x + a.x * turn.y) * scale, (b.y * turn.z + a.y * turn.w) * scale};
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        const float low = turned[2 * half], high = turned[2 * half + 1];
        const u32 rounded = bf16_pair(low, high);
        to[half * TURN_WORDS] = rounded;
        if (h < GROUP) to[(GROUP + 2) * HALF_DIM + half * TURN_WORDS] = bf16_pair(low - bf16_low(rounded), high - bf16_high(rounded));
      }
    }
  }
  return ok;
}

// Values 8 * chunk to 8 * chunk + 7 of a row in shared memory; zeros behind its end. `token`: whose row in a page it is, modulo
// 8; 0 for a row that is not from one.
__device__ __forceinline__ uint4 load_chunk(const u8* row, u32 chunk, u32 token = 0) {
  const u8* from = row + page_chunk(HEAD_DIM, token, chunk) * 16;
  if (HEAD_DIM % (8 * VALUE_CHUNKS) == 0) return *reinterpret_cast<const uint4*>(from);
  uint4 values = make_uint4(0, 0, 0, 0);
  if (HEAD_DIM % 8 == 0) {
    if (chunk < CHUNKS) values = *reinterpret_cast<const uint4*>(from);
    return values;
  }
  uint2 low = make_uint2(0, 0), high = low;  // rows are multiples of 8 bytes
  if (chunk * 8 < HEAD_DIM) low = *reinterpret_cast<const uint2*>(from);
  if (chunk * 8 + 4 < HEAD_DIM) high = *reinterpret_cast<const uint2*>(from + 8);
  return make_uint4(low.x, low.y, high.x, high.y);
}

// A warp's running attention of a quad of query heads over its octets, on the tensor cores. Queries and weights are split in
// two bf16 numbers, what was rounded off being the second, so products are those of float32 within 2^-16.
//
// Scores: rows 0 to 7 of A are the queries, each head twice, and rows 8 to 15 what was rounded off; columns of B are keys. A
// lane then has the scores of one head with tokens `quarter` and `quarter` + 4: what it needs in A to multiply the values.
// There the rows of a head, `group` % 2, are for even and for odd places of the values: a row has zeros in every other place of
// K, so that two neighbours of a token's value, as they lie in memory, can be B's rows 2t and 2t + 1.
struct Attention {
  float sum[4][4] = {};
  float maximum = NEGATIVE, weight = 0;  // weight: of the lane's own tokens
  u32 lane = forget(lane_index()), warp = forget(warp_index());

  __device__ __forceinline__ u32 group() const { return lane / 4; }
  __device__ __forceinline__ u32 quarter() const { return lane % 4; }
  __device__ __forceinline__ u32 head() const { return warp / VALUE_SPLITS % QUADS * QUAD + group() / 2; }
  __device__ __forceinline__ u32 first_chunk() const { return warp % VALUE_SPLITS * VALUE_CHUNKS; }
  // Warps that are left over repeat what the last one does.
  __device__ __forceinline__ u32 token_warp() const { return min(warp / SPLITS, TOKEN_WARPS - 1); }

  // Columns 2t and 2t + 1 of a product are both in lanes of quarter t: the token, or the chunk, of a column.
  static __device__ __forceinline__ u32 of_column(u32 column) { return column / 2 + column % 2 * 4; }

  // The first or the second of two weights in its place of K, and zero in the other.
  __device__ __forceinline__ u32 first_of(u32 pair) const { return group() % 2 ? pair << 16 : pair & 0xffff; }
  __device__ __forceinline__ u32 second_of(u32 pair) const { return group() % 2 ? pair & 0xffff0000 : pair >> 16; }

  // 1 to 8 tokens, of a page from a multiple of 8 on, or the new one. What lies behind them may be anything, NaN included: the last one's row stands for it, with weight 0.
  __device__ __forceinline__ void octet(const Machine& m, const u8* keys, const u8* values, u32 tokens) {
    const u32 token = min(of_column(group()), tokens - 1);
    const u8* key = keys + token * ROW_BYTES;
    const u8* query = reinterpret_cast<const u8*>(m.shared.heads()) + min(head(), GROUP - 1) * ROW_BYTES;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (u32 i = 0; i < KEY_STEPS; i++) {
      const uint4 k = load_chunk(key, 4 * i + quarter(), token), q = load_chunk(query, 4 * i + quarter()),
                  rest = load_chunk(query + (GROUP + 2) * ROW_BYTES, 4 * i + quarter());
      mma_bf16(even, q.x, rest.x, q.y, rest.y, k.x, k.y);
      mma_bf16(odd, q.z, rest.z, q.w, rest.w, k.z, k.w);
    }
    const u32 chunk = first_chunk() + of_column(group());
    const auto load_value = [&](u32 token) { return load_chunk(values + token * ROW_BYTES, chunk, token); };
    const uint4 low = load_value(min(forget(quarter()), tokens - 1)), high = load_value(min(forget(quarter() + 4), tokens - 1));
    float first = (even[0] + odd[0]) + (even[2] + odd[2]), second = (even[1] + odd[1]) + (even[3] + odd[3]);
    if (quarter() >= tokens) first = NEGATIVE;
    if (quarter() + 4 >= tokens) second = NEGATIVE;
    float best = max(maximum, max(first, second));
    best = max(best, shuffle_xor(best, 1));
    best = max(best, shuffle_xor(best, 2));
    const float shrink = exp2_approx(maximum - best);
    maximum = best;
    first = exp2_approx(first - best);
    second = exp2_approx(second - best);
    weight = weight * shrink + (first + second);
    const u32 rounded = bf16_pair(first, second), rest = bf16_pair(first - bf16_low(rounded), second - bf16_high(rounded));
    const u32 a[4] = {first_of(rounded), first_of(rest), second_of(rounded), second_of(rest)};
    const u32 b[4][2] = {{low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
    for (u32 w = 0; w < 4; w++) {
#pragma unroll
      for (u32 i = 0; i < 4; i++) sum[w][i] *= shrink;
      mma_bf16(sum[w], a[0], a[1], a[2], a[3], b[w][0], b[w][1]);
    }
  }

  // The warp's octets of `cached` earlier tokens, whose pieces are in the ring, and the new token if there is one. False: gave up.
  __device__ __forceinline__ bool all(Machine& m, u32 cached, bool newest) {
    const u32 pieces = (cached + PIECE_TOKENS - 1) / PIECE_TOKENS;
    if (token_warp() < TOKEN_WARPS - 1) newest = false;
    MegaCursor at = m.at;
    at.advance(token_warp() / OWNERS);
    m.at.advance(pieces);
    u32 next = token_warp() % OWNERS;  // octet, counted from the piece's first
#pragma unroll 1
    for (u32 piece = token_warp() / OWNERS; piece < pieces || newest; piece += AT_ONCE) {
      const bool in_ring = piece < pieces;
      const u8* keys = reinterpret_cast<const u8*>(m.shared.heads() + GROUP * HALF_DIM);
      u32 tokens = 1;
      if (in_ring) {
        if (warp_ballot(!m.take(at)) != 0) return false;
        keys = m.ring.stages + at.stage * STAGE_BYTES;
        tokens = min(PIECE_TOKENS, cached - piece * PIECE_TOKENS);
      } else {
        newest = false;
        next = 0;
      }
#pragma unroll 1
      for (; next < PIECE_OCTETS; next += OWNERS) {
        const u8* rows = keys + next * (OCTET * ROW_BYTES);
        if (next * OCTET < tokens) octet(m, rows, rows + (in_ring ? PIECE_BYTES : ROW_BYTES), min(OCTET, tokens - next * OCTET));
      }
      next -= PIECE_OCTETS;
      if (!in_ring) break;
      m.ring.free(at, true, AT_ONCE);
      at.advance(AT_ONCE);
    }
    return true;
  }

  // Leaves the warp's records; one without tokens has a maximum only.
  __device__ __forceinline__ void record(const Machine& m) {
    weight += shuffle_xor(weight, 1);
    weight += shuffle_xor(weight, 2);
    if (head() >= GROUP || warp >= SPLITS * TOKEN_WARPS) return;
    float* mine = records(m) + (token_warp() * GROUP + head()) * RECORD;
    if (group() % 2 == 0 && quarter() == 0 && first_chunk() == 0) *reinterpret_cast<float2*>(mine + HEAD_DIM) = make_float2(maximum, weight);
    if (maximum == NEGATIVE) return;
    mine += group() % 2;
#pragma unroll
    for (u32 w = 0; w < 4; w++)
#pragma unroll
      for (u32 c = 0; c < 2; c++) {
        const u32 place = (first_chunk() + of_column(2 * quarter() + c)) * 8 + 2 * w;
        if (HEAD_DIM % (8 * VALUE_CHUNKS) == 0 || place < HEAD_DIM) mine[place] = sum[w][c] + sum[w][2 + c];
      }
  }
};

// Merges the warps' records, four lanes to a pair of values; then either publishes the result, or this member's part of it.
__device__ __forceinline__ void merge_records(const Machine& m, const Task& task, u32 sequence, u32 head, u32 parts) {
  constexpr u32 LANES = 4, PAIRS = GROUP * HALF_DIM, EACH = (TOKEN_WARPS + LANES - 1) / LANES;
#pragma unroll 1
  for (u32 i = forget(threadIdx.x); i - lane_index() < LANES * PAIRS; i += CONSUMERS) {
    const u32 part = i % LANES, h = min(i / LANES, PAIRS - 1) / HALF_DIM, pair = i / LANES % HALF_DIM;
    const float* record = records(m) + (part * GROUP + h) * RECORD;
    float2 state[EACH], sums[EACH] = {};  // maximum and weight; two neighbouring values
    float maximum = NEGATIVE, weight = 0, low = 0, high = 0;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      state[j] = make_float2(NEGATIVE, 0);
      if (j * LANES + part >= TOKEN_WARPS) continue;
      state[j] = *reinterpret_cast<const float2*>(record + j * LANES * GROUP * RECORD + HEAD_DIM);
      sums[j] = *reinterpret_cast<const float2*>(record + j * LANES * GROUP * RECORD + 2 * pair);
      maximum = max(maximum, state[j].x);
    }
#pragma unroll
    for (u32 mask = 1; mask < LANES; mask *= 2) maximum = max(maximum, shuffle_xor(maximum, mask));
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      if (state[j].x == NEGATIVE) continue;  // its sums may be anything
      const float shrink = exp2_approx(state[j].x - maximum);
      weight += shrink * state[j].y;
      low += shrink * sums[j].x;
      high += shrink * sums[j].y;
    }
#pragma unroll
    for (u32 mask = 1; mask < LANES; mask *= 2) {
      weight += shuffle_xor(weight, mask);
      low += shuffle_xor(low, mask);
      high += shuffle_xor(high, mask);
    }
    if (i >= LANES * PAIRS) continue;
    const u32 query_head = head * GROUP + h;
    if (parts == 1) {
      const float inverse = divide_ordinary(1.0f, weight);
      const u32 word = m.header.mixed_word + sequence * m.header.mixed_words + query_head * HALF_DIM + pair;
      if (part == 0) publish(m.launch.exchange + word, bf16_pair(low * inverse, high * inverse), m.tag() + 1);  // as combine would
      continue;
    }
    if (part >= 2 && pair > 0) continue;
    const u32 word = m.header.partial_word + sequence * m.header.partial_words + (query_head * m.header.members + task.member) * RECORD;
    m.give_word(word + (part < 2 ? 2 * pair : HEAD_DIM - 2) + part,
                __float_as_uint(part == 0 ? low : part == 1 ? high : part == 2 ? maximum : weight));
  }
}

// The warp that appends: neither one of those that take inputs first, nor the one with a product's first rows.
constexpr u32 APPENDER = MK_WARPS - 2;

// By one warp; the others go on, since only a later token needs it. `tell_appended` follows.
__device__ __forceinline__ void append(const Machine& m, const Task& task, u32 sequence, u32 head, u32 position) {
  u8* page = m.launch.pages + page_offset(m.launch, task.layer, head, sequence, position / PAGE_TOKENS);
  u32* to = reinterpret_cast<u32*>(page) + position % PAGE_TOKENS * HALF_DIM;
  const u32* key = m.shared.heads() + GROUP * HALF_DIM;
#pragma unroll 1
  for (u32 i = lane_index(); i < HALF_DIM; i += WARP) {
    const u32 at = page_value(HEAD_DIM, position, 2 * i) / 2;
    to[at] = key[i];
    to[PAGE_TOKENS * HALF_DIM + at] = key[HALF_DIM + i];
  }
}

// Tells the loader what `task`, an attention phase, has appended, and that later tokens may read it back with bulk copies. It is
// called after the out phase: the fence waits until the stores have reached L2, and others would wait for this CTA meanwhile.
__device__ __forceinline__ void tell_appended(const Machine& m, const Task& task) {
  if (task.count == 0 || warp_index() != APPENDER) return;
  fence_proxy_async_global();
  __syncwarp();
  if (lane_index() == 0) store_release_cta(m.shared.words() + WORD_APPENDED, m.shared.words()[WORD_APPENDED] + 1);
}

// Attends to what this member has of the task's KV head number `index`. What the task and the split say is read anew after each
// meeting: registers are short while the sums are in them.
__device__ __forceinline__ bool attend(Machine& m, const Task& task, u32 sequence, u32 index) {
  const KvSplit& split = m.shared.splits()[sequence];
  if (task.member >= split.parts) return true;
  if (!m.meet(take_heads(m, task, sequence, task.first + index * task.stride, task.member == split.owner))) return false;
  m.mark(Mark::TAKEN);
  Attention attention;
  bool ok = attention.all(m, split.cached(m.header, task.member), task.member == split.owner);
  attention.record(m);
  m.mark(Mark::MULTIPLIED);
  if (!m.meet(ok)) return false;
  m.mark(Mark::MET);
  const u32 head = task.first + index * task.stride;
  merge_records(m, task, sequence, head, split.parts);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // the next phase's inputs go where the records are
  if (task.member == split.owner && warp_index() == APPENDER) append(m, task, sequence, head, split.position);
  return true;
}

__device__ __forceinline__ bool attention_phase(Machine& m, const Task& task) {
  if (task.count == 0) return true;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++)
#pragma unroll 1
    for (u32 i = 0; i < task.count; i++) {
      if (s + i > 0) barrier_sync(CONSUMER_BARRIER, CONSUMERS);  // the next heads go where the last ones are appended from
      if (!attend(m, task, s, i)) return false;
    }
  return true;
}
