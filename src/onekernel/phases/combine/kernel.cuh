// The combine phase: member 0 of a KV head merges the members' parts. With one part attention has published the result.
#pragma once

#include "phases/attention/kernel.cuh"

__device__ __forceinline__ bool combine_head(const Machine& m, const Task& task, u32 sequence, u32 head, u32 parts) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < GROUP * HALF_DIM; i += CONSUMERS) {
    const u32 query_head = head * GROUP + i / HALF_DIM, pair = i % HALF_DIM;
    const u32 base = m.header.partial_word + sequence * m.header.partial_words + query_head * m.header.members * RECORD;
    float maximum = NEGATIVE, weight = 0, low = 0, high = 0;
#pragma unroll 1
    for (u32 part = 0; part < parts; part++) {
      const u32 word = base + part * RECORD;
      float part_low, part_maximum;
      u32 part_high, part_weight;
      if (!m.take_two_words(word + 2 * pair, task.in_phase, part_low, part_high)) return false;
      if (!m.take_two_words(word + HEAD_DIM, task.in_phase, part_maximum, part_weight)) return false;
      const float larger = max(maximum, part_maximum);
      const float old = __expf(maximum - larger), fresh = __expf(part_maximum - larger);
      maximum = larger;
      weight = weight * old + __uint_as_float(part_weight) * fresh;
      low = low * old + part_low * fresh;
      high = high * old + __uint_as_float(part_high) * fresh;
    }
    const u32 word = m.header.mixed_word + sequence * m.header.mixed_words + query_head * HALF_DIM + pair;
    m.give_word(word, bf16_pair(low / weight, high / weight));
  }
  return true;
}

__device__ __forceinline__ bool combine_phase(Machine& m, const Task& task) {
  bool ok = true;
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 parts = kv_chunks(m.header, m.position(s) + 1);
    for (u32 i = 0; ok && parts > 1 && i < task.count; i++) ok = combine_head(m, task, s, task.first + i * task.stride, parts);
  }
  return m.meet(ok);
}
