// One small case per wrapper of kernels/ptx/, chosen by `part`. The host computes what `out` must be.
#include "ptx/access.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/clock.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/divide.cuh"
#include "ptx/copy.cuh"
#include "ptx/dp4a.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shuffle.cuh"

__device__ u32 bf16_words(const u16* at, u32 step) { return at[0] | static_cast<u32>(at[step]) << 16; }

// a (16, 16) row-major, b (16, 8) row-major, c (16, 8).
__device__ void multiply_bf16(const u16* a, const u16* b, float* c) {
  const u32 group = lane_index() / 4, t = lane_index() % 4;
  float sum[4] = {1, 2, 3, 4};
  mma_bf16(sum, bf16_words(a + group * 16 + 2 * t, 1), bf16_words(a + (group + 8) * 16 + 2 * t, 1),
           bf16_words(a + group * 16 + 2 * t + 8, 1), bf16_words(a + (group + 8) * 16 + 2 * t + 8, 1),
           bf16_words(b + 2 * t * 8 + group, 8), bf16_words(b + (2 * t + 8) * 8 + group, 8));
  for (u32 i = 0; i < 4; i++) c[(group + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

__device__ u32 byte_words(const u8* at, u32 step) {
  return at[0] | at[step] << 8 | at[2 * step] << 16 | static_cast<u32>(at[3 * step]) << 24;
}

// a (16, 32) row-major, b (32, 8) row-major, c (3, 16, 8): signed x signed, unsigned x signed, signed x unsigned.
__device__ void multiply_bytes(const u8* a, const u8* b, i32* c) {
  const u32 group = lane_index() / 4, t = lane_index() % 4;
  const u32 a0 = byte_words(a + group * 32 + 4 * t, 1), a1 = byte_words(a + (group + 8) * 32 + 4 * t, 1);
  const u32 a2 = byte_words(a + group * 32 + 4 * t + 16, 1), a3 = byte_words(a + (group + 8) * 32 + 4 * t + 16, 1);
  const u32 b0 = byte_words(b + 4 * t * 8 + group, 8), b1 = byte_words(b + (4 * t + 16) * 8 + group, 8);
  i32 sum[3][4] = {};
  mma_s8s8(sum[0], a0, a1, a2, a3, b0, b1);
  mma_u8s8(sum[1], a0, a1, a2, a3, b0, b1);
  mma_s8u8(sum[2], a0, a1, a2, a3, b0, b1);
  for (u32 kind = 0; kind < 3; kind++)
    for (u32 i = 0; i < 4; i++) c[kind * 128 + (group + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[kind][i];
}

// out (32, 12)
__device__ void exchange(u32* out) {
  const u32 lane = lane_index();
  u32* mine = out + lane * 12;
  mine[0] = shuffle_xor(lane * 3, 5);
  mine[1] = shuffle_index(lane * 3, 37);
  mine[2] = shuffle_down(lane * 3, 4);
  mine[3] = warp_ballot(lane % 3 == 0);
  mine[4] = __float_as_uint(shuffle_xor(static_cast<float>(lane), 16));
  mine[5] = static_cast<u32>(dp4a_ss(0x80ff7f01u + lane, 0x01fe037fu, -5));
  mine[6] = static_cast<u32>(dp4a_us(0x80ff7f01u + lane, 0x01fe037fu, -5));
  mine[7] = bf16_pair(1.0f + lane * 0.001f, -3.0f - lane * 0.003f);
  mine[8] = warp_max(lane * 0x9E3779B9u);
  mine[9] = warp_min(lane * 0x9E3779B9u + 5);
  mine[10] = warp_sum(lane * 0x9E3779B9u);
  mine[11] = 0;
}

// Warps 0 and 1 meet at barrier 3, warps 2 and 3 at barrier 4; then all. out (4, 32)
__device__ void meet(u32* out) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  const u32 pair = warp_index() / 2;
  shared[threadIdx.x] = threadIdx.x * 7;
  barrier_sync(3 + pair, 64);
  const u32 other = shared[threadIdx.x ^ 32];
  const u32 any = barrier_any(3 + pair, 64, pair == 1 && lane_index() == 9);
  const u32 none = barrier_any(3 + pair, 64, false);
  if (warp_index() == 3)
    barrier_arrive(5, 128);
  else
    barrier_sync(5, 128);
  out[threadIdx.x] = other << 8 | any << 1 | none;
}

// Two copies into one mbarrier, then a third that uses it again. in (3, 512) bytes, out (384) words and two flags.
__device__ void copy(const u8* in, u32* out) {
  u8* shared = dynamic_shared();
  Mbarrier* landed = reinterpret_cast<Mbarrier*>(shared + 1536);
  if (threadIdx.x == 0) {
    mbarrier_init(landed, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    out[384] = mbarrier_test(landed, 0);
    out[385] = mbarrier_test(landed, 1);  // the phase before the first counts as over
    bulk_prefetch(in, 1536);
    mbarrier_arrive_expect(landed, 512);
    bulk_copy(shared, in, 512, landed, CachePolicy::EVICT_FIRST);
    mbarrier_expect(landed, 512);
    bulk_copy(shared + 512, in + 512, 512, landed, CachePolicy::EVICT_LAST);
    mbarrier_arrive(landed);
  }
  while (!mbarrier_try_wait(landed, 0)) spin_pause();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive(landed);
    mbarrier_arrive_expect(landed, 512);
    bulk_copy(shared + 1024, in + 1024, 512, landed, CachePolicy::EVICT_NORMAL);
  }
  while (!mbarrier_try_wait(landed, 1)) spin_pause();
  for (u32 i = threadIdx.x; i < 384; i += blockDim.x) out[i] = reinterpret_cast<u32*>(shared)[i];
}

// Keys appended by stores and read back by a bulk copy: both proxy fences. in-out (64) words, out (64).
__device__ void copy_back(u32* memory, u32* out) {
  u8* shared = dynamic_shared();
  Mbarrier* landed = reinterpret_cast<Mbarrier*>(shared + 256);
  if (threadIdx.x == 0) {
    mbarrier_init(landed, 1);
    fence_mbarrier_init();
  }
  reinterpret_cast<u32*>(shared)[threadIdx.x] = 1;  // the generic store that the copy then overwrites
  fence_proxy_async_shared();
  memory[threadIdx.x] = threadIdx.x * 11 + 1;
  fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(landed, 256);
    bulk_copy(shared, memory, 256, landed, CachePolicy::EVICT_NORMAL);
  }
  while (!mbarrier_try_wait(landed, 0)) spin_pause();
  out[threadIdx.x] = reinterpret_cast<u32*>(shared)[threadIdx.x];
}

// CTA 0 writes data and raises a flag, CTA 1 waits and copies; once for every way to do so. words: (12, 16) u64, zeros.
__device__ void pass_on(u64* words, u64* out) {
  if (threadIdx.x != 0) return;
  for (u32 way = 0; way < 12; way++) {
    u64* data = words + way * 16;
    u64* flag = data + 2;
    u32* flag32 = reinterpret_cast<u32*>(flag);
    Pair* flags = reinterpret_cast<Pair*>(flag);
    if (blockIdx.x == 0) {
      *data = 100 + way;
      if (way == 4 || way == 9) fence_gpu();
      if (way == 5 || way == 10) fence_sys();
      switch (way) {
        case 0: store_release_gpu(flag, 1); break;
        case 1: store_release_sys(flag, 1); break;
        case 2: store_release_gpu(flag32, 1); break;
        case 3: store_release_sys(flag32, 1); break;
        case 4: store_relaxed_gpu(flag, 1); break;
        case 5: store_relaxed_sys(flag, 1); break;
        case 6: store_release_gpu(flags, {1, 1}); break;
        case 7: store_release_sys(flags, {1, 1}); break;
        case 8: add_release_gpu(flag32, 1); break;
        case 9: store_relaxed_gpu(flags, {1, 1}); break;
        case 10: store_relaxed_sys(flags, {1, 1}); break;
        case 11:
          store_relaxed_gpu(flag32 + 1, 5);
          store_relaxed_sys(flag32 + 2, 6);
          add_release_gpu(flag32, 1);
          break;
      }
    } else {
      u64 seen = 0;
      while (seen == 0) {
        spin_pause();
        switch (way) {
          case 0: seen = load_acquire_gpu(flag); break;
          case 1: seen = load_acquire_sys(flag); break;
          case 2: seen = load_acquire_gpu(flag32); break;
          case 3: seen = load_acquire_sys(flag32); break;
          case 4: seen = load_relaxed_gpu(flag); break;
          case 5: seen = load_relaxed_sys(flag); break;
          case 6: seen = load_acquire_gpu(flags).first & load_acquire_gpu(flags).second; break;
          case 7: seen = load_acquire_sys(flags).first & load_acquire_sys(flags).second; break;
          case 8: seen = load_acquire_gpu(flag32); break;
          case 9: seen = load_relaxed_gpu(flags).first & load_relaxed_gpu(flags).second; break;
          case 10: seen = load_relaxed_sys(flags).first & load_relaxed_sys(flags).second; break;
          case 11: seen = load_acquire_gpu(flag32); break;
        }
      }
      if (way == 4 || way == 9) fence_gpu();
      if (way == 5 || way == 10) fence_sys();
      out[way] = *data;
      if (way == 11) out[way] += 1000 * load_relaxed_gpu(flag32 + 1) + 10000 * load_relaxed_sys(flag32 + 2);
    }
  }
}

// counters (2) and a word that one thread of the grid may claim; out (threads): who saw it unclaimed
__device__ void count(u32* counters, u64* claimed, u32* out) {
  add_relaxed_gpu(&counters[0], threadIdx.x);
  add_release_gpu(&counters[1], 1);
  const u32 me = blockIdx.x * blockDim.x + threadIdx.x;
  out[me] = compare_and_swap_gpu(claimed, 0, me + 1) == 0;
}

// Every CTA sends (rank, lane) to the next one by store, asynchronous store and a remote arrival. out (ctas, 32, 4)
__device__ void reach_over(u32* out) {
  u64* plain = reinterpret_cast<u64*>(dynamic_shared());  // (32)
  u64* async = plain + 32;                                // (32)
  Mbarrier* landed = reinterpret_cast<Mbarrier*>(async + 32);
  Mbarrier* arrived = landed + 1;
  const u32 lane = threadIdx.x, rank = cluster_rank(), next = (rank + 1) % cluster_size();
  if (lane == 0) {
    mbarrier_init(landed, 1);
    mbarrier_init(arrived, 32);
    fence_mbarrier_init();
    mbarrier_arrive_expect(landed, 32 * 8);
  }
  cluster_arrive();
  cluster_wait();
  cluster_store_relaxed(cluster_address(plain + lane, next), 1000 * rank + lane);
  cluster_store_async(cluster_address(async + lane, next), 2000 * rank + lane, cluster_address(landed, next));
  cluster_mbarrier_arrive(cluster_address(arrived, next));
  while (!mbarrier_try_wait(landed, 0)) spin_pause();
  while (!mbarrier_try_wait(arrived, 0)) spin_pause();
  cluster_arrive();
  cluster_wait();
  u32* mine = out + (blockIdx.x * 32 + lane) * 4;
  mine[0] = static_cast<u32>(cluster_load_relaxed(cluster_address(plain + lane, rank)));
  mine[1] = static_cast<u32>(async[lane]);
  mine[2] = static_cast<u32>(cluster_load_relaxed(cluster_address(plain + lane, next)));
  mine[3] = 256 * cluster_size() + rank;
  cluster_arrive();
  cluster_wait();
}

// out (2): nonzero if a clock went on during a sleep
__device__ void wait_a_while(u64* out) {
  if (threadIdx.x != 0) return;
  const u64 cycles = clock_cycles(), ns = clock_ns();
  for (u32 i = 0; i < 200; i++) sleep_ns(1000);
  out[0] = clock_cycles() - cycles;
  out[1] = clock_ns() - ns;
}

// Two groups of copies and an empty one, each read by another thread than the one that copied. in, out (2, 64, 4)
__device__ void copy_pieces(const u32* in, u32* out) {
  uint4* shared = reinterpret_cast<uint4*>(dynamic_shared());
  const u32 thread = threadIdx.x, other = (thread + 33) % 64;
  async_copy(shared + thread, in + thread * 4, true);
  async_copies_commit();
  async_copy_cached(shared + 64 + thread, in + 256 + thread * 4, thread % 2 == 0);
  async_copies_commit();
  async_copies_commit();
  async_copies_wait<2>();
  __syncthreads();
  reinterpret_cast<uint4*>(out)[other] = shared[other];
  async_copies_wait<0>();
  __syncthreads();
  reinterpret_cast<uint4*>(out)[64 + other] = shared[64 + other];
}

// in (32, 8): four matrices. out (2, 32, 4): as they are, and transposed.
__device__ void load_fragments(const u32* in, u32* out) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  const u32 lane = lane_index();
  for (u32 i = 0; i < 4; i++) shared[lane * 4 + i] = in[lane * 4 + i];
  __syncwarp();
  u32 plain[4], transposed[4];
  load_matrices(plain, shared + lane * 4);
  load_matrices_transposed(transposed, shared + lane * 4);
  for (u32 i = 0; i < 4; i++) {
    out[lane * 4 + i] = plain[i];
    out[128 + lane * 4 + i] = transposed[i];
  }
}

// Two sums of all threads, in global and in shared memory, and who came when to the second. sum (1), out (threads)
__device__ void add_up(u64* sum, u32* out) {
  u32* shared = reinterpret_cast<u32*>(dynamic_shared());
  if (threadIdx.x == 0) *shared = 0;
  __syncthreads();
  add_relaxed_gpu(sum, (1ull << 40) + forget(threadIdx.x));
  out[threadIdx.x] = fetch_add_cta(shared, 1);
}

// pairs (threads, 2), out (threads, 2)
__device__ void divide_pairs(const float* pairs, float* out) {
  const float a = pairs[threadIdx.x * 2], b = pairs[threadIdx.x * 2 + 1];
  out[threadIdx.x * 2] = divide(a, b);
  out[threadIdx.x * 2 + 1] = divide_ordinary(a, b);
}

extern "C" __global__ void __launch_bounds__(128) wrappers(i32 part, u8* in, u8* out) {
  u32* words = reinterpret_cast<u32*>(out);
  u16* halves = reinterpret_cast<u16*>(in);
  switch (part) {
    case 0: return multiply_bf16(halves, halves + 256, reinterpret_cast<float*>(out));
    case 1: return multiply_bytes(in, in + 512, reinterpret_cast<i32*>(out));
    case 2: return exchange(words);
    case 3: return meet(words);
    case 4: return copy(in, words);
    case 5: return copy_back(reinterpret_cast<u32*>(in), words);
    case 6: return pass_on(reinterpret_cast<u64*>(in), reinterpret_cast<u64*>(out));
    case 7: return count(reinterpret_cast<u32*>(in), reinterpret_cast<u64*>(in) + 1, words);
    case 8: return reach_over(words);
    case 9: return wait_a_while(reinterpret_cast<u64*>(out));
    case 10: return copy_pieces(reinterpret_cast<u32*>(in), words);
    case 11: return load_fragments(reinterpret_cast<u32*>(in), words);
    case 12: return add_up(reinterpret_cast<u64*>(in), words);
    case 13: return divide_pairs(reinterpret_cast<float*>(in), reinterpret_cast<float*>(out));
  }
}
