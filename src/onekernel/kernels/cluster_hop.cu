// What a hand-over inside a cluster costs: in every round each CTA stores its share of `words` values into the shared
// memory of all CTAs of its cluster, and takes all of them. Once with tagged words that the readers poll, once with
// asynchronous stores that an mbarrier counts.
//
// Two boxes are enough: whoever writes round r + 2 has taken all of round r + 1, and every CTA sent its part of that
// after it had taken round r. So every CTA must have a share: words >= CTAs of the cluster.
//
// Constant: HOP_THREADS.
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "tile/spin.cuh"
#include "tile/tagged.cuh"

// The value of a word in a round: what the reader sums shows a lost or a stale one.
__device__ __forceinline__ u32 hop_value(u32 round, u32 word) { return round * 40503u + word * 9973u; }

// Calls store(word, value, rank) for this thread's part of the CTA's share, for every CTA of the cluster.
template <class Store>
__device__ __forceinline__ void send(u32 words, u32 round, Store store) {
  const u32 rank = cluster_rank(), size = cluster_size();
  const u32 begin = words * rank / size, end = words * (rank + 1) / size;
  for (u32 to = warp_index(); to < size; to += HOP_THREADS / WARP)
    for (u32 i = begin + lane_index(); i < end; i += WARP) store(i, hop_value(round, i), to);
}

extern "C" __global__ void __launch_bounds__(HOP_THREADS, 1)
    cluster_hop_tagged(u32 words, u32 rounds, u32* sums,  // (threads of the grid)
                       u32* abort, u64* records, u32 max_turns) {
  const Watch watch{abort, records, max_turns};
  u64* box = reinterpret_cast<u64*>(dynamic_shared());  // (2, words)
  for (u32 i = threadIdx.x; i < 2 * words; i += HOP_THREADS) box[i] = 0;
  cluster_arrive();
  cluster_wait();
  u32 sum = 0;
  for (u32 round = 0; round < rounds; round++) {
    u64* mine = box + round % 2 * words;
    send(words, round, [&](u32 i, u32 value, u32 to) {
      cluster_store_relaxed(cluster_address(mine + i, to), tagged(value, round + 1));
    });
    bool ok = true;
    for (u32 i = threadIdx.x; ok && i < words; i += HOP_THREADS) {
      u64 word = 0;
      ok = spin(watch, Wait::SHARE, i, round + 1, [&](u64& seen) {
        word = cluster_load_relaxed(shared_address(mine + i));
        seen = word >> 32;
        return seen == round + 1;
      });
      sum += static_cast<u32>(word);
    }
    if (barrier_any(1, HOP_THREADS, !ok)) break;
  }
  sums[blockIdx.x * HOP_THREADS + threadIdx.x] = sum;
  cluster_arrive();
  cluster_wait();
}

extern "C" __global__ void __launch_bounds__(HOP_THREADS, 1)
    cluster_hop_async(u32 words, u32 rounds, u32* sums, u32* abort, u64* records, u32 max_turns) {
  const Watch watch{abort, records, max_turns};
  Mbarrier* landed = reinterpret_cast<Mbarrier*>(dynamic_shared());  // (2)
  u64* box = reinterpret_cast<u64*>(landed + 2);                     // (2, words)
  if (threadIdx.x == 0) {
    mbarrier_init(&landed[0], 1);
    mbarrier_init(&landed[1], 1);
    fence_mbarrier_init();
  }
  cluster_arrive();
  cluster_wait();
  u32 sum = 0;
  for (u32 round = 0; round < rounds; round++) {
    u64* mine = box + round % 2 * words;
    Mbarrier* mine_landed = &landed[round % 2];
    if (threadIdx.x == 0) mbarrier_arrive_expect(mine_landed, words * 8);
    send(words, round, [&](u32 i, u32 value, u32 to) {
      cluster_store_async(cluster_address(mine + i, to), value, cluster_address(mine_landed, to));
    });
    const bool ok = spin_mbarrier(watch, Wait::SHARE, round, mine_landed, round / 2 % 2);
    for (u32 i = threadIdx.x; ok && i < words; i += HOP_THREADS) sum += static_cast<u32>(mine[i]);
    if (barrier_any(1, HOP_THREADS, !ok)) break;
  }
  sums[blockIdx.x * HOP_THREADS + threadIdx.x] = sum;
  cluster_arrive();
  cluster_wait();
}
