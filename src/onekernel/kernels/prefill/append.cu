// From raw queries, keys and values to rotated queries and an extended cache: QK-norm, RoPE, and the pages' new slots.
// One warp for each head of each token.
//
// Constants: PF_HEAD_DIM, PF_QK_NORM.
#include "ptx/convert.cuh"
#include "ptx/shuffle.cuh"
#include "tile/page.cuh"

constexpr u32 WARPS = 8, THREADS = WARPS * WARP;
constexpr u32 HALF = PF_HEAD_DIM / 2, PAIRS = (HALF + WARP - 1) / WARP;  // pairs (i, i + HALF) of a lane
constexpr u32 PAGE_TOKENS = 64;

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_append(const float* qkv,        // (qkv_room, columns): queries, keys, values of a token side by side
           u32 columns, u32 tokens,
           u32 start,               // position of the first token
           u32 heads, u32 kv_heads,
           const float* constants,  // (floats)
           u32 rope,                // where (positions, HALF, 2) begins: cosine and sine
           u32 q_norm, u32 k_norm,  // where this layer's weights begin
           float eps,
           const i32* page_table,   // (table_pages)
           u16* pages,              // (pages, kv_heads, 2, PAGE_TOKENS, PF_HEAD_DIM) bf16 of this layer
           u16* queries) {          // (q_room, heads, PF_HEAD_DIM) bf16
  const u32 vector = blockIdx.x * WARPS + warp_index(), per_token = heads + 2 * kv_heads;
  const u32 token = vector / per_token, head = vector % per_token;
  if (token >= tokens) return;
  const u32 position = start + token;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  const float* from = qkv + static_cast<u64>(token) * columns + head * PF_HEAD_DIM;
  float low[PAIRS], high[PAIRS];
  float squares = 0;
#pragma unroll
  for (u32 i = 0; i < PAIRS; i++) {
    const u32 at = lane_index() + i * WARP;
    low[i] = at < HALF ? from[at] : 0.0f;
    high[i] = at < HALF ? from[at + HALF] : 0.0f;
    squares += low[i] * low[i] + high[i] * high[i];
  }
  if (PF_QK_NORM && !is_value) {
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) squares += shuffle_xor(squares, mask);
    const float factor = rsqrtf(squares / PF_HEAD_DIM + eps);
    const float* weight = constants + (is_query ? q_norm : k_norm);
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
      const u32 at = lane_index() + i * WARP;
      if (at >= HALF) continue;
      low[i] *= factor * weight[at];
      high[i] *= factor * weight[at + HALF];
    }
  }
  u16* to = queries + (static_cast<u64>(token) * heads + head) * PF_HEAD_DIM;
  if (!is_query) {
    const u32 kv_head = (head - heads) % kv_heads, page = static_cast<u32>(page_table[position / PAGE_TOKENS]);
    const u64 part = (static_cast<u64>(page) * kv_heads + kv_head) * 2 + is_value;
    to = pages + (part * PAGE_TOKENS + position % PAGE_TOKENS) * PF_HEAD_DIM;
  }
  const float* angles = constants + rope + static_cast<u64>(position) * PF_HEAD_DIM;
#pragma unroll
  for (u32 i = 0; i < PAIRS; i++) {
    const u32 at = lane_index() + i * WARP;
    if (at >= HALF) continue;
    float first = low[i], second = high[i];
    if (!is_value) {
      const float cosine = angles[at * 2], sine = angles[at * 2 + 1];
      first = low[i] * cosine - high[i] * sine;
      second = high[i] * cosine + low[i] * sine;
    }
    const u32 pair = bf16_pair(first, second);
    to[is_query ? at : page_value(PF_HEAD_DIM, position, at)] = static_cast<u16>(pair);
    to[is_query ? at + HALF : page_value(PF_HEAD_DIM, position, at + HALF)] = static_cast<u16>(pair >> 16);
  }
}
