// The combine phase: the members of a KV head merge their parts, each of them a slice of the head's values. With one part
// attention has published the result.
#pragma once

#include "phases/attention/kernel.cuh"

// What one or several parts of the cache say of two neighbouring values of a query head.
struct Merged {
  float maximum = NEGATIVE, weight = 0, low = 0, high = 0;

  __device__ __forceinline__ void add(const Merged& other) {
    const float larger = max(maximum, other.maximum);
    const float old = exp2_approx(maximum - larger), fresh = exp2_approx(other.maximum - larger);
    maximum = larger;
    weight = weight * old + other.weight * fresh;
    low = low * old + other.low * fresh;
    high = high * old + other.high * fresh;
  }
};

// Values `pair` of the record that begins at `word`, with its maximum and weight: both are asked for at once.
__device__ __forceinline__ bool take_part(const Machine& m, const Task& task, u32 word, u32 pair, Merged& part) {
  const Pair* values = reinterpret_cast<const Pair*>(m.launch.exchange + word + 2 * pair);
  const Pair* sums = reinterpret_cast<const Pair*>(m.launch.exchange + word + HEAD_DIM);
  const u32 want = m.tag_of(task.in_phase);
  Pair a{}, b{};
  const bool ok = spin(m.watch, Wait::VALUE, word + 2 * pair, want, [&](u64& seen) {
    a = load_relaxed_gpu(values);
    b = load_relaxed_gpu(sums);
    bool ready = true;
    for (u64 tag : {a.first >> 32, a.second >> 32, b.first >> 32, b.second >> 32}) {
      if (tag == want) continue;
      ready = false;
      seen = tag;
    }
    return ready;
  });
  part.low = __uint_as_float(static_cast<u32>(a.first));
  part.high = __uint_as_float(static_cast<u32>(a.second));
  part.maximum = __uint_as_float(static_cast<u32>(b.first));
  part.weight = __uint_as_float(static_cast<u32>(b.second));
  return ok;
}

// This member's slice of one KV head, a warp for each pair of values and a lane for each part.
__device__ __forceinline__ bool combine_head(const Machine& m, const Task& task, u32 sequence, u32 head, u32 parts) {
  constexpr u32 PAIRS = GROUP * HALF_DIM;
  const u32 last = PAIRS * (task.member + 1) / m.header.members;
  bool ok = true;
#pragma unroll 1
  for (u32 i = PAIRS * task.member / m.header.members + warp_index(); i < last; i += MK_WARPS) {
    const u32 query_head = head * GROUP + i / HALF_DIM, pair = i % HALF_DIM;
    const u32 word = m.header.partial_word + sequence * m.header.partial_words + query_head * m.header.members * RECORD;
    Merged merged;
#pragma unroll 1
    for (u32 number = lane_index(); ok && number < parts; number += WARP) {
      Merged part;
      ok = take_part(m, task, word + number * RECORD, pair, part);
      merged.add(part);
    }
    __syncwarp();
    float maximum = merged.maximum;
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) maximum = max(maximum, shuffle_xor(maximum, mask));
    const float shrink = exp2_approx(merged.maximum - maximum);
    float weight = shrink * merged.weight, low = shrink * merged.low, high = shrink * merged.high;
#pragma unroll
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
      weight += shuffle_xor(weight, mask);
      low += shuffle_xor(low, mask);
      high += shuffle_xor(high, mask);
    }
    if (lane_index() > 0) continue;
    const float inverse = divide_ordinary(1.0f, weight);
    const u32 to = m.header.mixed_word + sequence * m.header.mixed_words + query_head * HALF_DIM + pair;
    m.give_word(to, bf16_pair(low * inverse, high * inverse));
  }
  return ok;
}

__device__ __forceinline__ bool combine_phase(Machine& m, const Task& task) {
  bool ok = true, waited = false;
#pragma unroll 1
  for (u32 s = 0; s < SEQUENCES; s++) {
    const u32 parts = m.shared.splits()[s].parts;
#pragma unroll 1
    for (u32 i = 0; parts > 1 && i < task.count; i++) {
      ok = ok && combine_head(m, task, s, task.first + i * task.stride, parts);
      waited = true;
    }
  }
  return !waited || m.meet(ok);
}
