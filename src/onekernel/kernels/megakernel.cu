// The megakernel: one persistent kernel that makes a whole answer. It interprets a plan (onekernel/plan): for every CTA a
// list of tasks, one a phase, run token after token until an end-of-sequence token, the limit or the host ends it.
//
// A CTA is MK_WARPS warps that compute and one that loads. The loader streams the CTA's weights, and keys and values of
// earlier positions, through the ring in the order of the tasks, without waiting for anything that this token computes.
// Values travel between CTAs in tagged words: tag = token * phases + phase + 1.
#include "phases/attention/kernel.cuh"
#include "phases/choose/kernel.cuh"
#include "phases/combine/kernel.cuh"
#include "phases/down/kernel.cuh"
#include "phases/embed/kernel.cuh"
#include "phases/gate/kernel.cuh"
#include "phases/gate_up/kernel.cuh"
#include "phases/gather/kernel.cuh"
#include "phases/head/kernel.cuh"
#include "phases/out/kernel.cuh"
#include "phases/qkv/kernel.cuh"

__device__ __forceinline__ bool is_product(u32 kind) {
  return kind == static_cast<u32>(Kind::QKV) || kind == static_cast<u32>(Kind::OUT) || kind == static_cast<u32>(Kind::GATE_UP) ||
         kind == static_cast<u32>(Kind::DOWN) || kind == static_cast<u32>(Kind::HEAD) || (SPARSE && kind == static_cast<u32>(Kind::GATE));
}

// The one thread that fills the ring.
struct Loader {
  const Launch& launch;
  const Watch& watch;
  const u32* words;  // SharedWord
  KvSplit* splits;     // (SEQUENCES): of the token that is loaded
  Producer<MK_STAGES, STAGE_BYTES, MK_WARPS> producer;
  Trace<TRACED> trace;
  const u8 *next = nullptr, *end = nullptr;  // of the phase's weights: behind the stage to be filled, and behind the last
  const u8* ahead = nullptr;                 // L2 was asked for what lies before
  u64 asked = 0;                             // when, in cycles

  // Has L2 fetch a stage of what comes after the ring, no more often than memory delivers one. It begins while the ring
  // is full, when memory would idle until consumers get their values; then they take stages faster than memory brings
  // them, and the lead shrinks until copies come from memory again.
  __device__ __forceinline__ void look_ahead(bool full) {
    if (ahead < next) ahead = next;
    if (ahead >= end || ahead >= next + launch.windows.lead * static_cast<u64>(STAGE_BYTES) || (!full && ahead == next)) return;
    const u64 now = clock_cycles();
    if (now - asked < launch.windows.pace) return;
    bulk_prefetch(ahead, static_cast<u32>(min(static_cast<u64>(STAGE_BYTES), static_cast<u64>(end - ahead))));
    ahead += STAGE_BYTES;
    asked = now;
  }

  // Waits until the next stage is free. False if the CTA leaves: it looks at the leave word while it waits, because
  // consumers that have left free nothing any more.
  __device__ __forceinline__ bool free() {
    if (producer.at.round > 0) {
      const u32 stage = producer.at.stage, parity = (producer.at.round - 1) & 1;
      const Mbarrier* freed = &producer.ring.freed[stage];
      bool full = false;
      if (!spin(watch, Wait::FREED, stage, parity, [&](u64& seen) {
            seen = parity ^ 1;
            if (mbarrier_test(freed, parity) || load_acquire_cta(words + WORD_LEAVE) != 0) return true;
            if (TRACED && !full) trace.mark(Mark::FULL, 0);
            full = true;
            look_ahead(true);
            return false;
          }))
        return false;
    }
    return load_acquire_cta(words + WORD_LEAVE) == 0;
  }

  // Starts the next copy, or two; see Producer::fill. False if the CTA leaves.
  __device__ __forceinline__ bool fill(const u8* source, u32 bytes, const u8* second = nullptr, u32 second_at = 0) {
    if (!free()) return false;
    look_ahead(false);
    const u32 before = producer.in_flight;
    if (!producer.fill(watch, source, bytes, second, second_at)) return false;
    if (TRACED) {
      for (u32 left = before; left >= producer.in_flight; left--) trace.mark(Mark::LANDED, left - 1);
      trace.mark(Mark::ISSUED, bytes / 16 * (second == nullptr ? 1 : 2));
    }
    return true;
  }

  __device__ __forceinline__ bool product(const Task& task) {
    const u8* source = launch.weights + task.weights;
    const u64 bytes = static_cast<u64>(task.count) * task.k_units * unit_bytes(task.flags);
    const u32 stages = static_cast<u32>((bytes + STAGE_BYTES - 1) / STAGE_BYTES);
    ahead = source;
    end = source + bytes;
    for (u64 done = 0; done < bytes; done += STAGE_BYTES) {
      producer.window = launch.windows.of(static_cast<u32>(done / STAGE_BYTES), stages);
      next = source + min(done + STAGE_BYTES, bytes);
      if (!fill(source + done, min(static_cast<u64>(STAGE_BYTES), bytes - done))) return false;
    }
    return true;
  }

  // Waits until this CTA has appended what the token before `token` left in this layer: the only thing it waits for.
  __device__ __forceinline__ bool appended(u32 token, u32 layer) const {
    const u32 layers = launch.header->layers, want = token * layers + layer + 1;
    if (token == 0) return true;
    const bool ok = spin(watch, Wait::APPENDED, layer, want - layers, [&](u64& seen) {
      seen = load_acquire_cta(words + WORD_APPENDED);
      return seen + layers >= want || load_acquire_cta(words + WORD_LEAVE) != 0;
    });
    fence_proxy_async_global();
    return ok;
  }

  __device__ __forceinline__ bool attention(const Task& task, u32 token) {
    if (task.count > 0 && !appended(token, task.layer)) return false;
    end = next = ahead;
    for (u32 s = 0; s < SEQUENCES; s++)
      for (u32 i = 0; i < task.count; i++)
        if (!cache(task, s, task.first + i * task.stride)) return false;
    return true;
  }

  // The earlier keys and values of one head that are this member's.
  __device__ __forceinline__ bool cache(const Task& task, u32 sequence, u32 head) {
    const u32 cached = splits[sequence].cached(*launch.header, task.member), block_pages = launch.header->block_pages;
    // Of more than two pieces each would take a round trip to memory, and there is nothing else that the CTAs wait for.
    producer.window = cached > 2 * PIECE_TOKENS ? launch.windows.deep_window : launch.windows.short_window;
    u32 page = task.member * block_pages, pages = block_pages, first = 0;  // pages left in the block, first token in the page
    for (u32 done = 0; done < cached; done += PIECE_TOKENS) {
      const u8* keys = launch.pages + page_offset(launch, task.layer, head, sequence, page) + first * HEAD_DIM * 2;
      const u32 bytes = round_up(min(PIECE_TOKENS, cached - done), 8) * HEAD_DIM * 2;  // a multiple of 16, inside the page
      if (!fill(keys, bytes, keys + PAGE_TOKENS * HEAD_DIM * 2, PIECE_BYTES)) return false;
      first += PIECE_TOKENS;
      if (first < PAGE_TOKENS) continue;
      first = 0;
      page++;
      if (--pages > 0) continue;
      page += (launch.header->members - 1) * block_pages;
      pages = block_pages;
    }
    return true;
  }

  __device__ __forceinline__ void run(const Task* tasks) {
    bool ok = true;
    trace.begin(launch.trace, 1);
    for (u32 token = 0; ok && token < launch.limit; token++) {
      trace.at_token(launch.trace, token);
      for (u32 s = 0; s < SEQUENCES; s++) splits[s] = KvSplit::of(*launch.header, launch.positions[s] + token);
      for (u32 p = 0; ok && p < launch.header->phases && p <= launch.stop_after; p++) {
        const Task& task = tasks[p];
        if (task.kind == static_cast<u32>(Kind::ATTENTION)) ok = attention(task, token);
        if (is_product(task.kind)) ok = product(task);
      }
    }
    producer.drain();
    trace.end(launch.trace, 1);
  }
};

__device__ __forceinline__ bool run_phase(Machine& m, const Task& task, bool& last) {
  const Kind kind = static_cast<Kind>(task.kind);
  if (kind == Kind::EMBED) return embed_phase(m, task, last);
  if (kind == Kind::ATTENTION) return attention_phase(m, task);
  if (kind == Kind::COMBINE) return task.count == 0 || combine_phase(m, task);
  if (kind == Kind::CHOOSE) return choose_phase(m, task);
  if (SPARSE && kind == Kind::GATHER) return task.count == 0 || gather_phase(m, task);
  if (kind == Kind::HEAD) {
    start_bests(m);
    draw_ahead(m, task);
  }
  const Task own = task;  // in registers: behind every wait it would be loaded anew
  bool ok;
  if (HEAD_INT8 && kind == Kind::HEAD) {
    ok = own.count == 0 || quantised_product<true>(m, own, [&](const Rows& rows, const RowScale<true>& scale) { head_rows(m, own, rows, &scale); });
  } else if (TERNARY && kind != Kind::HEAD) {
    const Task mine = task;  // not `own`, which would live on; a product with groups has no registers for either
    ok = task.count == 0 || quantised_product<false>(m, SCALE_GROUP > 0 ? task : mine, [&](const Rows& rows, const RowScale<false>& scale) {
      for_quantised_pairs(m, task, rows, scale, [&](u32 row, float2 value) {
        if (kind == Kind::QKV) qkv_rows(m, task, rows, 0, row, value);
        if (kind == Kind::OUT || kind == Kind::DOWN) residual_rows(m, task, rows, 0, row, value);
        if (kind == Kind::GATE_UP) gate_up_rows(m, task, rows, 0, row, value);
      });
    });
  } else {  // the same three lines; shared with the above they would compile to something else in dense builds
    const Task& dense = TERNARY ? task : own;  // a ternary model's head
    ok = task.count == 0 || product(m, dense, [&](const Rows& rows) {
      if (TERNARY || kind == Kind::HEAD) return head_rows(m, dense, rows);
      for_row_pairs(m, own, rows, [&](u32 sequence, u32 row, float2 value) {
        if (kind == Kind::QKV) qkv_rows(m, own, rows, sequence, row, value);
        if (kind == Kind::OUT || kind == Kind::DOWN) residual_rows(m, own, rows, sequence, row, value);
        if (kind == Kind::GATE_UP) gate_up_rows(m, own, rows, sequence, row, value);
        // `task`: with `own` dense and sparse builds compile to something else.
        if (SPARSE && kind == Kind::GATE) gate_rows(m, task, rows, row, value);
      });
    });
  }
  if (SPARSE && kind == Kind::GATE && ok && task.count > 0) firing_rows(m, task);
  if (kind == Kind::HEAD) {
    ok = m.meet(ok);
    if (m.launch.choosing.mode == CHOOSE_GREEDY)
      publish_bests(m);
    else
      publish_scores(m, task);
  }
  return ok;
}

__device__ __forceinline__ void compute(Machine& m) {
  bool ok = true, last = false;
  if (threadIdx.x == 0) m.trace.begin(m.launch.trace, 0);
  for (m.token = 0; ok && m.token < m.launch.limit; m.token++) {
    if (threadIdx.x == 0) m.trace.at_token(m.launch.trace, m.token);
    for (m.phase = 0; ok && !last && m.phase < m.header.phases; m.phase++) {
      m.mark(Mark::PHASE);
      ok = run_phase(m, m.shared.tasks()[m.phase], last);
      m.mark(Mark::END);
      if (threadIdx.x == 0) m.trace.weights(m.phase);
      if (m.phase == m.launch.stop_after) last = true;
    }
    if (last) break;
  }
  if (threadIdx.x > 0) return;
  m.trace.end(m.launch.trace, 0);
  store_release_cta(m.shared.words() + WORD_LEAVE, 1);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + WARP, 1)
    megakernel(const __grid_constant__ Header header, const Task* tasks, const u8* weights, const float* constants, u8* pages,
               const u32* page_table, u64* exchange, const u32* first_tokens, const u32* positions, const u32* stop_ids,
               u32 stop_count, u32 limit, u64* slots, const u32* cancel, float* logits, u32 logit_stride, u32 stop_after,
               u32 short_window, u32 long_window, u32 long_phase, u32 deep_window, u32 deep_phase, u32 deep_from, u32 lead, u32 pace, u64* trace, u32 trace_room, u32 trace_token, u32 mode,
               const Sampling* sampling, u32* counts, const float* bias, const u32* allowed, float* scores, u64* choice,
               u64* reports, u32* abort, u64* records, u32 max_turns) {
  const Launch launch{&header,   weights,    constants, pages, page_table, exchange, first_tokens,
                      positions, stop_ids,   stop_count, limit, slots,      cancel,   logits,
                      logit_stride, stop_after, {short_window, long_window, long_phase, deep_window, deep_phase, deep_from, lead, pace}, {trace, trace_room, trace_token},
                      {mode, sampling, counts, bias, allowed, scores, choice, reports}};
  const Watch watch{abort, records, max_turns};
  u8* bytes = dynamic_shared();
  MegaRing ring(bytes);
  const Shared shared{header};
  if (threadIdx.x == 0) {
    ring.init();
    shared.words()[WORD_LEAVE] = shared.words()[WORD_APPENDED] = shared.words()[WORD_STOPPED] = 0;
  }
  const u64* from = reinterpret_cast<const u64*>(tasks + static_cast<u64>(blockIdx.x) * header.phases);
  for (u32 i = threadIdx.x; i < header.phases * (sizeof(Task) / 8); i += blockDim.x)
    reinterpret_cast<u64*>(shared.tasks())[i] = from[i];
  __syncthreads();
  if (warp_index() < MK_WARPS) {
    Machine machine{launch, header, watch, shared, ring, {}, 0, 0, Trace<TRACED>(shared.trace(0))};
    compute(machine);
  } else if (lane_index() == 0) {
    Loader loader{launch, watch, shared.words(), shared.splits() + SEQUENCES, {ring, short_window, {}, {}}, Trace<TRACED>(shared.trace(1))};
    loader.run(shared.tasks());
  }
}
