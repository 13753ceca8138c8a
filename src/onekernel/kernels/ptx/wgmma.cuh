// Tensor-core products of a warpgroup, four warps from one whose index is a multiple of four (wgmma, sm_90a alone): d (64,
// N) += a (64, 32) * b (32, N), a unsigned bytes in registers, b signed bytes in shared memory, d exact 32-bit sums.
//
// Warp w of the four has rows 16 w to 16 w + 15: its fragments of a are those of mma_u8s8, and d[4 j] to d[4 j + 3] are that
// product's c for columns 8 j to 8 j + 7. b stands column by column, 128 bytes apart, from a multiple of 1,024 on; 16-byte
// piece p of column c is at p ^ c % 8, and a product takes 32 of the 128 bytes.
//
// A product goes on after its instruction. Between fence and wait nobody touches d or a, or writes b; stores to b come
// before a fence_proxy_async_shared() of their thread and a barrier. On the CPU a product is whole when its call returns.
#pragma once

#include "ptx/mma.cuh"

#ifdef __CUDACC__
using Columns = u64;
#else
using Columns = const u8*;
#endif

// What a product takes for b: bytes 32 * part to 32 * part + 31 of the columns from `columns` on.
__device__ __forceinline__ Columns columns_of(const u8* columns, u32 part) {
#ifdef __CUDACC__
  // Address, and distance of eight columns, in 16 bytes each; the layout in the two highest bits is the one above.
  return u64{shared_address(columns) + part * 32} >> 4 & 0x3fff | u64{1024 >> 4} << 32 | u64{1} << 62;
#else
  return columns + part * 32;
#endif
}

#ifndef __CUDACC__
template <u32 N>
inline void warpgroup_product(i32 (&d)[N / 2], const u32 (&a)[4], Columns b) {
  const u64 first = reinterpret_cast<u64>(b), column = lane_index() / 4, swizzle = column * 16;
  for (u32 j = 0; j < N / 8; j++) {
    u32 word[2];
    for (u32 half = 0; half < 2; half++) {
      const u64 at = first + (j * 8 + column) * 128 + half * 16;
      word[half] = *reinterpret_cast<const u32*>((at ^ swizzle) + lane_index() % 4 * 4);
    }
    shim::mma<unsigned char, signed char>(reinterpret_cast<i32(&)[4]>(d[4 * j]), {a[0], a[1], a[2], a[3]}, {word[0], word[1]});
  }
}
#endif

__device__ __forceinline__ void wgmma_u8s8(i32 (&d)[32], const u32 (&a)[4], Columns b) {
#ifdef __CUDACC__
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  warpgroup_product<64>(d, a, b);
#endif
}

__device__ __forceinline__ void wgmma_u8s8(i32 (&d)[64], const u32 (&a)[4], Columns b) {
#ifdef __CUDACC__
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.u32 add, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
        "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
        "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
        "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]),
        "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]),
        "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
        "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]),
        "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  warpgroup_product<128>(d, a, b);
#endif
}

// Before the first product, and after registers of one were written.
__device__ __forceinline__ void wgmma_fence() {
#ifdef __CUDACC__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends the group of this warpgroup's products.
__device__ __forceinline__ void wgmma_commit() {
#ifdef __CUDACC__
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Returns when all groups of this warpgroup's products but the last LEFT are whole.
template <u32 LEFT>
__device__ __forceinline__ void wgmma_wait() {
#ifdef __CUDACC__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

// Stands where a register must be as it is: the compiler knows nothing of who reads or writes it meanwhile.
template <class T>
__device__ __forceinline__ void hold(T& value) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(value)::"memory");
#endif
}
