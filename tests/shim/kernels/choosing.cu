// The head's end and the choice, token after token, on logits that the host gives: the megakernel's own functions.
#include "phases/choose/kernel.cuh"

// Does what head_rows does, with given logits of one token in the place of products. Ends with a meeting.
__device__ void take_given(const Machine& m, const Task& task, const float* given) {
  start_bests(m);
  draw_ahead(m, task);
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
  for (u32 s = 0; s < SEQUENCES; s++) {
    Best best = warp_bests(m, s)[warp_index()];
    for (u32 i = threadIdx.x; i < task.count * 8; i += CONSUMERS) {
      const u32 token = task.first * 8 + i;
      if (token >= m.header.vocab_limit) continue;
      const u64 at = static_cast<u64>(s) * m.launch.logit_stride + token;
      best.add_value(given[at], token, FAILED_LOGITS);
      m.launch.logits[at] = given[at];
    }
    __syncwarp();
    best.add_warp();
    if (lane_index() == 0) warp_bests(m, s)[warp_index()] = best;
  }
  barrier_sync(CONSUMER_BARRIER, CONSUMERS);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS, 1)
    choosing(const Header* header, const Task* tasks, const float* given, u64* exchange, const u32* positions,
             const u32* stop_ids, u32 stop_count, u32 limit, u64* slots, const u32* cancel, float* logits, u32 vocab,
             u32 mode, const Sampling* sampling, u32* counts, const float* bias, const u32* allowed, float* scores,
             u64* choice, u64* reports, u32* abort, u64* records, u32 max_turns) {
  const Launch launch{header, nullptr, nullptr, nullptr, nullptr, exchange, nullptr, positions, stop_ids, stop_count, limit,
                      slots, cancel, logits, vocab, NO_PHASE, {}, {},
                      {mode, sampling, counts, bias, allowed, scores, choice, reports}};
  const Watch watch{abort, records, max_turns};
  const Shared shared{*header};
  if (threadIdx.x == 0) shared.words()[WORD_STOPPED] = 0;
  for (u32 i = threadIdx.x; i < 2 * sizeof(Task) / 4; i += CONSUMERS)
    reinterpret_cast<u32*>(shared.tasks())[i] = reinterpret_cast<const u32*>(tasks + blockIdx.x * 2)[i];
  __syncthreads();
  Machine m{launch, *header, watch, shared, MegaRing(dynamic_shared()), {}, 0, 0, Trace<TRACED>()};
  bool ok = true;
  for (m.token = 0; ok && m.token < limit; m.token++) {
    m.phase = 0;
    take_given(m, m.shared.tasks()[0], given + static_cast<u64>(m.token) * SEQUENCES * vocab);
    if (mode == CHOOSE_GREEDY)
      publish_bests(m);
    else
      publish_scores(m, m.shared.tasks()[0]);
    m.phase = 1;
    ok = choose_phase(m, m.shared.tasks()[1]);
    if (threadIdx.x < SEQUENCES) {
      u32 token = TOKEN_STOP;
      if (ok) ok = m.take_word(header->token_word + threadIdx.x, 1, token);
      m.shared.words()[WORD_TOKEN + threadIdx.x] = token;
    }
    ok = m.meet(ok);
    if (m.shared.words()[WORD_TOKEN] & TOKEN_STOP) break;
  }
}
