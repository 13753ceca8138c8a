// Philox4x32-10, as in philox.py: the random words of tokens 4 * group to 4 * group + 3 at a position.
#pragma once

#include "ptx/platform.cuh"

__device__ __forceinline__ uint4 philox(u64 seed, u32 position, u32 group) {
  u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
  uint4 c = make_uint4(group, position, 0, 0);
#pragma unroll 1
  for (u32 round = 0; round < 10; round++) {
    const u64 first = static_cast<u64>(c.x) * 0xD2511F53u, second = static_cast<u64>(c.z) * 0xCD9E8D57u;
    c = make_uint4(static_cast<u32>(second >> 32) ^ c.y ^ key0, static_cast<u32>(second), static_cast<u32>(first >> 32) ^ c.w ^ key1,
                   static_cast<u32>(first));
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}
