// Tensor-core products of one warp: c (16, 8) += a (16, k) * b (k, 8).
//
// Fragments, with group = lane / 4 and t = lane % 4. bf16, k = 16: a0 holds (row group, columns 2t, 2t + 1), a1 row
// group + 8, a2 and a3 the same rows at columns 2t + 8, 2t + 9; b0 holds (rows 2t, 2t + 1, column group), b1 rows 2t +
// 8, 2t + 9. int8, k = 32: four bytes in place of two halves, 4t.. and 4t + 16... c0, c1 are (row group, columns 2t, 2t
// + 1), c2, c3 row group + 8. A product sums over k, so any permutation of k shared by a and b gives the same result:
// packed weights use one that turns a lane's fragments into consecutive bytes.
#pragma once

#include "ptx/platform.cuh"

// bf16 inputs, float sums.
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  shim::mma<shim::Bf16, shim::Bf16>(c, {a0, a1, a2, a3}, {b0, b1});
#endif
}

// Signed bytes on both sides, exact 32-bit sums.
__device__ __forceinline__ void mma_s8s8(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  shim::mma<signed char, signed char>(c, {a0, a1, a2, a3}, {b0, b1});
#endif
}

// a unsigned, b signed: ternary codes 0, 1, 2 as the rows.
__device__ __forceinline__ void mma_u8s8(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  shim::mma<unsigned char, signed char>(c, {a0, a1, a2, a3}, {b0, b1});
#endif
}

// a signed, b unsigned: ternary codes as the columns.
__device__ __forceinline__ void mma_s8u8(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef __CUDACC__
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  shim::mma<signed char, unsigned char>(c, {a0, a1, a2, a3}, {b0, b1});
#endif
}
