// Puts int8 activations in the order that wgmma.cu takes, with zeros behind them, and adds up each token's. One CTA a token.
//
// Constants: ORDER_THREADS.
#include "ptx/dp4a.cuh"
#include "ptx/shuffle.cuh"
#include "ternary/order.cuh"

constexpr u32 THREADS = ORDER_THREADS, WARPS = THREADS / WARP;

extern "C" __global__ void __launch_bounds__(THREADS) ternary_order(const u8* q,  // (tokens, columns), a multiple of 4
                                                                    u8* ordered,  // (tokens, width), a multiple of 64
                                                                    i32* sums,    // (tokens,)
                                                                    u32 columns, u32 width) {
  i32* parts = reinterpret_cast<i32*>(dynamic_shared());  // (WARPS,)
  const u32* from = reinterpret_cast<const u32*>(q + static_cast<u64>(blockIdx.x) * columns);
  u32* to = reinterpret_cast<u32*>(ordered + static_cast<u64>(blockIdx.x) * width);
  i32 sum = 0;
  for (u32 word = threadIdx.x; word < width / 4; word += THREADS) {
    const u32 bytes = word < columns / 4 ? from[word] : 0;
    sum = add_bytes(bytes, sum);
    to[place_of_word(word)] = bytes;
  }
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (lane_index() == 0) parts[warp_index()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (u32 warp = 1; warp < WARPS; warp++) sum += parts[warp];
  sums[blockIdx.x] = sum;
}
