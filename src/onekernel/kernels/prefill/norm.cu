// Root-mean-square norm of the residual, as bf16 for a product. One CTA for each token; its sum has one order, so a
// token's result depends on nothing else.
#include "ptx/convert.cuh"
#include "ptx/shuffle.cuh"

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_norm(const float* residual,   // (residual_room, columns); columns past `hidden` hold zeros
         u32 columns, u32 hidden,
         const float* constants,  // (floats)
         u32 weight,              // where the norm's weights begin: as many as `out_columns`, zeros past `hidden`
         float eps,
         u16* out,                // (out_room, out_columns) bf16; columns past `columns` become zeros
         u32 out_columns) {
  float* sums = reinterpret_cast<float*>(dynamic_shared());  // (THREADS / WARP)
  const float* x = residual + static_cast<u64>(blockIdx.x) * columns;
  u16* to = out + static_cast<u64>(blockIdx.x) * out_columns;
  float sum = 0;
  for (u32 column = threadIdx.x * 4; column < columns; column += THREADS * 4) {
    const float4 v = *reinterpret_cast<const float4*>(x + column);
    sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
  }
#pragma unroll
  for (u32 mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (lane_index() == 0) sums[warp_index()] = sum;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (u32 w = 0; w < THREADS / WARP; w++) total += sums[w];
  const float factor = rsqrtf(total / static_cast<float>(hidden) + eps);
  for (u32 column = threadIdx.x * 4; column < out_columns; column += THREADS * 4) {
    uint2 pairs = make_uint2(0, 0);
    if (column < columns) {
      const float4 v = *reinterpret_cast<const float4*>(x + column);
      const float4 w = *reinterpret_cast<const float4*>(constants + weight + column);
      pairs.x = bf16_pair(v.x * factor * w.x, v.y * factor * w.y);
      pairs.y = bf16_pair(v.z * factor * w.z, v.w * factor * w.w);
    }
    *reinterpret_cast<uint2*>(to + column) = pairs;
  }
}
