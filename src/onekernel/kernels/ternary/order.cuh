// The order of activations in which wgmma.cu takes them: that of the codes in a unit.
#pragma once

#include "ptx/platform.cuh"

// Where a word of four activations goes: in each sixteen of them, word 4 t + q to 4 q + t.
__device__ __forceinline__ u32 place_of_word(u32 word) { return (word & ~15u) | (word & 3) << 2 | (word >> 2 & 3); }
