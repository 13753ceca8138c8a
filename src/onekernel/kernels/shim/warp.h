// What the 32 lanes of a warp do together: shuffles and tensor-core products, each lane putting its part into a slot.
#pragma once

namespace shim {

// Meets the other lanes; returns every lane's value.
template <class T>
inline std::array<T, 32> gather(const char* operation, const T& value) {
  static_assert(sizeof(T) <= sizeof(Warp::slots[0][0]) && std::is_trivially_copyable<T>::value, "a slot is 32 bytes");
  Warp& warp = *self->block->warps[self->index / 32];
  u32 turn = self->collectives++ % 2;
  memcpy(warp.slots[turn][lane()], &value, sizeof value);
  warp.operations[turn][lane()] = operation;
  u32 generation = meet(warp.barrier, 32);
  wait_until(operation, [&] { return passed(warp.barrier, generation); });
  std::array<T, 32> values;
  for (u32 i = 0; i < 32; i++) {
    if (strcmp(warp.operations[turn][i], operation) != 0)
      fail("CTA %u, warp %u: lane %u is in %s and lane %u in %s; all lanes must take the same path here",
           self->block->index, self->index / 32, lane(), operation, i, warp.operations[turn][i]);
    memcpy(&values[i], warp.slots[turn][i], sizeof(T));
  }
  return values;
}

inline void warp_sync(u32 mask) {
  if (mask != ~0u) fail("__syncwarp(%#x): only whole warps meet here", mask);
  scheduling_point();
  gather("__syncwarp", 0);
}

template <class T>
inline T shuffle(T value, u32 source) {
  return gather("shuffle", value)[source % 32];
}

inline u32 ballot(bool predicate) {
  auto predicates = gather("ballot", predicate);
  u32 bits = 0;
  for (u32 i = 0; i < 32; i++) bits |= u32{predicates[i]} << i;
  return bits;
}

inline u32 warp_max(u32 value) {
  auto values = gather("warp_max", value);
  u32 highest = 0;
  for (u32 one : values) highest = one > highest ? one : highest;
  return highest;
}

inline u32 warp_sum(u32 value) {
  auto values = gather("warp_sum", value);
  u32 sum = 0;
  for (u32 one : values) sum += one;
  return sum;
}

// Each lane's row of 16 bytes; see ptx/matrix.cuh.
inline void load_matrices(u32 (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of a matrix at %p, which is not a multiple of 16", row);
  auto rows = gather("load_matrices", static_cast<const unsigned short*>(row));
  const u32 group = lane() / 4, t = lane() % 4 * 2;
  for (u32 i = 0; i < 4; i++) {
    const unsigned short* const* matrix = rows.data() + 8 * i;
    const u32 low = transposed ? matrix[t][group] : matrix[group][t];
    const u32 high = transposed ? matrix[t + 1][group] : matrix[group][t + 1];
    r[i] = low | high << 16;
  }
  gather("load_matrices", 0);  // nobody goes on to change what others still read
}

struct Bf16 {};  // names an element type

inline unsigned short bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fff;  // the NaN that the hardware makes
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
inline auto element(u32 word, u32 i) {
  if constexpr (std::is_same<T, Bf16>::value) {
    u32 bits = word >> (16 * i) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return static_cast<double>(value);
  } else {
    return static_cast<int>(static_cast<T>(word >> (8 * i)));
  }
}

template <class A, class B>
inline int dot(u32 a, u32 b, int sum) {
  for (u32 i = 0; i < 4; i++) sum += element<A>(a, i) * element<B>(b, i);
  return sum;
}

struct Fragments {
  std::array<u32, 4> a;
  std::array<u32, 2> b;
};

// c (16, 8) += a (16, K) * b (K, 8), K = 16 halves or 32 bytes, in the fragment order of ptx/mma.cuh. Sums are exact up
// to one rounding at the end; the tensor cores round in between.
template <class A, class B, class C>
inline void mma(C (&c)[4], std::array<u32, 4> a, std::array<u32, 2> b) {
  constexpr u32 PER_WORD = std::is_same<A, Bf16>::value ? 2 : 4, HALF = 4 * PER_WORD;
  auto lanes = gather("mma", Fragments{a, b});
  for (u32 i = 0; i < 4; i++) {
    u32 row = lane() / 4 + 8 * (i / 2), column = lane() % 4 * 2 + i % 2;
    typename std::conditional<std::is_same<C, float>::value, double, int>::type sum = c[i];
    for (u32 k = 0; k < 2 * HALF; k++) {
      u32 word_a = lanes[row % 8 * 4 + k % HALF / PER_WORD].a[row / 8 + 2 * (k / HALF)];
      u32 word_b = lanes[column * 4 + k % HALF / PER_WORD].b[k / HALF];
      sum += element<A>(word_a, k % PER_WORD) * element<B>(word_b, k % PER_WORD);
    }
    c[i] = static_cast<C>(sum);
  }
}

}  // namespace shim
