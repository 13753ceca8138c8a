// Four 8 x 8 matrices of 16-bit values from shared memory into the fragments of mma (ldmatrix). Lane l brings the
// address of row l % 8 of matrix l / 8: 16 bytes, a multiple of 16. All lanes of a warp take part.
#pragma once

#include "ptx/platform.cuh"

// r[i] holds values 2t and 2t + 1 of row group of matrix i, with group = lane / 4 and t = lane % 4.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#else
  shim::load_matrices(r, row, false);
#endif
}

// r[i] holds value group of rows 2t and 2t + 1 of matrix i.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* row) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#else
  shim::load_matrices(r, row, true);
#endif
}
