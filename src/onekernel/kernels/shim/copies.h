// A thread's own copies of 16 bytes. They land as late as they may, at the wait for their group; until then their
// target holds NaN, so a read without the wait, or a copy over what others still read, shows.
#pragma once

namespace shim {

inline void land(const Copy& copy) {
#ifdef SHIM_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(copy.to, 16);
#endif
  if (copy.from)
    memcpy(copy.to, copy.from, 16);
  else
    memset(copy.to, 0, 16);
}

inline void async_copy(void* to, const void* from, bool valid) {
  scheduling_point();
  Block& block = *self->block;
  auto offset = static_cast<unsigned char*>(to) - block.shared.get();
  if (offset < 0 || offset % 16 || static_cast<u64>(offset) + 16 > block.launch->config.shared_bytes)
    fail("CTA %u: a copy of 16 bytes to offset %td of its %llu bytes of shared memory", block.index, offset,
         block.launch->config.shared_bytes);
  if (valid && reinterpret_cast<uintptr_t>(from) % 16)
    fail("CTA %u: a copy of 16 bytes from %p, which is not a multiple of 16", block.index, from);
  memset(to, 0xff, 16);  // NaN as bf16 and as float
#ifdef SHIM_ADDRESS_SANITIZER
  __asan_poison_memory_region(to, 16);
#endif
  self->copies.push_back(
      {static_cast<unsigned char*>(to), valid ? static_cast<const unsigned char*>(from) : nullptr, self->copy_groups});
}

inline void async_copies_commit() { self->copy_groups++; }

inline void async_copies_wait(u32 left) {
  scheduling_point();
  auto& copies = self->copies;
  size_t landed = 0;
  while (landed < copies.size() && copies[landed].group + left < self->copy_groups) land(copies[landed++]);
  copies.erase(copies.begin(), copies.begin() + static_cast<ptrdiff_t>(landed));
}

// At the end of a CTA.
inline void check_copies(const Thread& thread) {
  if (!thread.copies.empty())
    fail("CTA %u, thread %u ended while %zu of its copies were on their way", thread.block->index, thread.index,
         thread.copies.size());
}

}  // namespace shim
