// How a page of the KV cache keeps its rows; onekernel/phases/attention/cache.py holds the same rule.
#pragma once

#include "ptx/platform.cuh"

// Where a row of `dim` values keeps its chunk of 8 values, 16 bytes, number `chunk`. All rows begin in the same bank of shared
// memory; so that the same chunk of 8 neighbouring tokens lies in different banks, tokens permute their chunks differently.
__device__ constexpr u32 page_chunk(u32 dim, u32 token, u32 chunk) { return dim % 64 == 0 ? chunk ^ token % 8 : chunk; }

// Where it keeps value number `index`.
__device__ constexpr u32 page_value(u32 dim, u32 token, u32 index) { return page_chunk(dim, token, index / 8) * 8 + index % 8; }
