// What every phase of the megakernel works with: the launch's arguments, a CTA's shared memory, and where it stands.
//
// Constants of a build: MK_WARPS (that compute), MK_STAGES (of the ring), MK_SEQUENCES, MK_HEAD_DIM, MK_GROUP (query heads
// of a KV head), MK_ACTIVATION (0 SiLU, 1 ReLU, 2 squared ReLU), MK_QK_NORM, MK_TRACE, MK_TERNARY (1: the layers' weights
// are), MK_SCALE_GROUP (columns that share a scale, 64 or 128; 0: all), MK_HEAD_INT8, MK_SPARSE (1: the feed-forwards read
// only the neurons that fire). Everything else is in the records.
#pragma once

#include "abi.cuh"
#include "phases/choose/launch.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared_word.cuh"
#include "ptx/shuffle.cuh"
#include "tile/ring.cuh"
#include "tile/tagged.cuh"
#include "tile/trace.cuh"

constexpr u32 CONSUMERS = MK_WARPS * WARP;
constexpr u32 SEQUENCES = MK_SEQUENCES;
constexpr u32 UNIT_BYTES = 1024, STAGE_UNITS = MK_WARPS, STAGE_BYTES = STAGE_UNITS * UNIT_BYTES;
constexpr u32 HEAD_DIM = MK_HEAD_DIM, GROUP = MK_GROUP;
constexpr u32 PAGE_TOKENS = 64;
constexpr u32 CONSUMER_BARRIER = 1;

using MegaRing = Ring<MK_STAGES, STAGE_BYTES, MK_WARPS>;
using MegaCursor = Cursor<MK_STAGES>;
constexpr bool TRACED = MK_TRACE, SPARSE = MK_SPARSE;

// Quantised weights: units of 16 rows, whose inputs are int8.
constexpr bool TERNARY = MK_TERNARY, HEAD_INT8 = MK_HEAD_INT8;
constexpr u32 SCALE_GROUP = MK_SCALE_GROUP;
constexpr u32 QUANTISED_UNIT_BYTES = 512, QUANTISED_STAGE_UNITS = STAGE_BYTES / QUANTISED_UNIT_BYTES, QUANTISED_ROWS = 16;
static_assert(!TERNARY || SEQUENCES == 1, "the other columns of a product are not used");

// Stages of weights that a CTA has on their way at once. Few where values travel, since everybody waits for those and they
// queue behind the weights; more inside long phases, when nobody waits.
struct Windows {
  u32 short_window, long_window, long_phase;  // in phases of up to, and of more than, long_phase stages
  u32 deep_window, deep_phase, deep_from;     // in those of more than deep_phase, from stage deep_from on
  u32 lead;                                   // stages that L2 may be asked for ahead of a full ring, 0 for none
  u32 pace;                                   // cycles between two such requests

  __device__ __forceinline__ u32 of(u32 stage, u32 stages) const {
    if (stages <= long_phase) return short_window;
    return stages > deep_phase && stage >= deep_from ? deep_window : long_window;
  }
};

// The launch's arguments, the same for all CTAs.
struct Launch {
  const Header* header;
  const u8* weights;        // (weight_bytes)
  const float* constants;   // norms, biases, rotations
  u8* pages;                // KV cache: (layers, num_pages, kv_heads, 2, PAGE_TOKENS, HEAD_DIM) bf16
  const u32* page_table;    // (SEQUENCES, table_pages)
  u64* exchange;            // zeros before the launch
  const u32* first_tokens;  // (SEQUENCES)
  const u32* positions;     // (SEQUENCES): of the first tokens
  const u32* stop_ids;      // (stop_count)
  u32 stop_count;
  u32 limit;                // tokens to make, 1 to MAX_LAUNCH_TOKENS
  u64* slots;               // pinned (limit, SEQUENCES): {token | bits, index + 1}
  const u32* cancel;        // pinned: not 0: end after the current token
  float* logits;            // (SEQUENCES, logit_stride) of the last token made; not written if logit_stride is 0
  u32 logit_stride;
  u32 stop_after;           // phase after which all CTAs leave, or NO_PHASE
  Windows windows;
  TraceBuffer trace;              // used only where TRACED
  Choosing choosing;
};

__host__ __device__ constexpr u32 round_up(u32 value, u32 step) { return (value + step - 1) / step * step; }

enum SharedWord : u32 { WORD_LEAVE, WORD_APPENDED, WORD_STOPPED, WORD_TOKEN, WORD_TRACE = (WORD_TOKEN + SEQUENCES + 3) / 4 * 4, WORD_BEST = WORD_TRACE + 8 };

// How the cache of a sequence is shared out for its next token. Block b of `block_pages` pages belongs to member b %
// members for ever, so it is appended and read by one CTA. Every layer of a token asks, so the divisions are done once.
// onekernel/plan/chunks.py holds the same rule.
struct alignas(16) KvSplit {
  u32 position;  // of the new token
  u32 parts;     // members that have tokens, the new one among them: 0 to parts - 1
  u32 owner;     // the member that appends the new token
  u32 whole;     // earlier tokens of every member, in the rounds in which each has a block

  static __device__ __forceinline__ KvSplit of(const Header& header, u32 position) {
    const u32 block_tokens = header.block_pages * PAGE_TOKENS, block = position / block_tokens, rounds = block / header.members;
    return {position, min(header.members, block + 1), block - rounds * header.members, rounds * block_tokens};
  }

  // Earlier tokens that `member` has.
  __device__ __forceinline__ u32 cached(const Header& header, u32 member) const {
    const u32 block_tokens = header.block_pages * PAGE_TOKENS;
    if (member == owner) return whole + position - (whole * header.members + owner * block_tokens);
    return member < owner ? whole + block_tokens : whole;
  }
};

// The shared memory of a CTA after the ring, in this order; onekernel/plan/shared.py lays it out the same way. What a build
// fixes comes first; where the rest begins is in the plan's header, whose members are constants too: neither costs registers.
struct Shared {
  static constexpr u32 ROPE = MegaRing::BYTES, HEADS = ROPE + round_up(SEQUENCES * HEAD_DIM, 4) * 4,
                       SUMS = HEADS + round_up((GROUP + 1) * HEAD_DIM, 4) * 4,
                       WORDS = SUMS + round_up(SEQUENCES * MK_WARPS, 4) * 4,
                       SPLITS = WORDS + round_up(WORD_BEST + 2 * SEQUENCES * MK_WARPS, 4) * 4,
                       TASKS = SPLITS + 2 * SEQUENCES * static_cast<u32>(sizeof(KvSplit));
  const Header& header;

  template <class T>
  static __device__ __forceinline__ T* at(u32 offset) {
    return reinterpret_cast<T*>(dynamic_shared() + offset);
  }

  // (SEQUENCES, HEAD_DIM / 2, 2): cosines and sines of the token's position.
  static __device__ __forceinline__ float* rope() { return at<float>(ROPE); }
  // (2 * GROUP + 2, HEAD_DIM / 2), pairs of bf16: queries, the new key, the new value, what was rounded off the queries.
  static __device__ __forceinline__ u32* heads() { return at<u32>(HEADS); }
  // (SEQUENCES, MK_WARPS): of squares.
  static __device__ __forceinline__ float* sums() { return at<float>(SUMS); }
  // SharedWord; from WORD_BEST on (SEQUENCES, MK_WARPS, 2): each warp's best logit and its token.
  static __device__ __forceinline__ u32* words() { return at<u32>(WORDS); }
  // Of the first computing thread (side 0) and the loader (side 1), used only where TRACED.
  static __device__ __forceinline__ TraceState* trace(u32 side) { return at<TraceState>(WORDS + WORD_TRACE * 4) + side; }
  // (2, SEQUENCES): those of the token that is computed, then the loader's own, which is up to a token ahead.
  static __device__ __forceinline__ KvSplit* splits() { return at<KvSplit>(SPLITS); }
  static __device__ __forceinline__ Task* tasks() { return at<Task>(TASKS); }  // (phases)
  // (SEQUENCES, max_inputs / 2): pairs of bf16. In attention and in the choice their scratch, which ends in `partial`.
  __device__ __forceinline__ u32* x() const { return at<u32>(TASKS + header.x_at); }
  // (SEQUENCES, max_rows, PART_SLOTS) sums over parts of K.
  __device__ __forceinline__ float* partial() const { return at<float>(TASKS + header.partial_at); }
  // Of the choice, and of products with int8 activations or sparse feed-forwards.
  __device__ __forceinline__ u32 choice_at() const { return TASKS + header.x_at; }
  __device__ __forceinline__ u32 rest_at() const { return TASKS + header.rest_at; }
  // (SEQUENCES, max_hidden_rows): this CTA's rows.
  __device__ __forceinline__ float* residual() const { return at<float>(TASKS + header.residual_at); }
};

// A CTA's consumers on their way through the tasks.
struct Machine {
  const Launch& launch;
  const Header& header;
  const Watch& watch;
  Shared shared;
  MegaRing ring;
  MegaCursor at;
  u32 token, phase;
  Trace<TRACED> trace;  // of thread 0

  __device__ __forceinline__ u32 tag_of(u32 of_phase) const { return token * header.phases + of_phase + 1; }
  __device__ __forceinline__ u32 tag() const { return tag_of(phase); }
  __device__ __forceinline__ u32 position(u32 sequence) const { return launch.positions[sequence] + token; }

  __device__ __forceinline__ void mark(Mark what) {
    if (TRACED && threadIdx.x == 0) trace.mark(what, phase);
  }

  // Waits for a stage of the ring.
  __device__ __forceinline__ bool take(const MegaCursor& stage) {
    return trace.timed([&] { return ring.take(watch, stage); });
  }

  // All consumers meet. False if any of them failed: then all leave.
  __device__ __forceinline__ bool meet(bool ok) const { return !barrier_any(CONSUMER_BARRIER, CONSUMERS, !ok); }

  // One word that another CTA publishes in `of_phase` of this token.
  __device__ __forceinline__ bool take_word(u32 word, u32 of_phase, u32& value) const {
    const u32 want = tag_of(of_phase);
    u64 got = 0;
    const bool ok = spin(watch, Wait::VALUE, word, want, [&](u64& seen) {
      got = load_relaxed_gpu(launch.exchange + word);
      seen = got >> 32;
      return seen == want;
    });
    value = static_cast<u32>(got);
    return ok;
  }

  __device__ __forceinline__ void give_word(u32 word, u32 value) const { publish(launch.exchange + word, value, tag()); }
};

// Rows of a row tile, and bytes of a weight unit.
__device__ __forceinline__ u32 residual_tile_rows(u32 flags) { return TERNARY ? QUANTISED_ROWS : flags & FLAG_ROWS_4 ? 4 : 8; }
__device__ __forceinline__ u32 unit_bytes(u32 flags) {
  return TERNARY && flags & (FLAG_TERNARY | FLAG_INT8) ? QUANTISED_UNIT_BYTES : UNIT_BYTES;
}

// Words of one sequence in the buffer that a phase of this kind takes its inputs from.
__device__ __forceinline__ u32 input_words(const Header& header, Kind kind) {
  if (kind == Kind::OUT) return header.mixed_words;
  return kind == Kind::DOWN ? header.inner_words : header.x_words;
}
