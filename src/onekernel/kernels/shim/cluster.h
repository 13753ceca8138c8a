// Clusters and distributed shared memory.
#pragma once

namespace shim {

inline u32 cluster_size() { return self->block->launch->config.cluster; }
inline u32 cluster_rank() { return self->block->index % cluster_size(); }

inline void cluster_arrive() {
  scheduling_point();
  self->cluster_generation = meet(self->block->cluster->barrier, cluster_size() * self->block->launch->config.block);
}

inline void cluster_wait() {
  Barrier& barrier = self->block->cluster->barrier;
  wait_until("the cluster barrier", [&] { return passed(barrier, self->cluster_generation); });
}

inline Block& cluster_block(u32 rank) {
  if (rank >= cluster_size()) fail("rank %u in a cluster of %u", rank, cluster_size());
  return *self->block->launch->blocks[self->block->index - cluster_rank() + rank];
}

inline unsigned char* cluster_address(const void* local, u32 rank) {
  auto offset = static_cast<const unsigned char*>(local) - shared_memory();
  if (offset < 0 || static_cast<u64>(offset) >= self->block->launch->config.shared_bytes)
    fail("CTA %u maps an address outside its own shared memory into the cluster", self->block->index);
  return cluster_block(rank).shared.get() + offset;
}

// A word in the shared memory of some CTA of this cluster, which must still be running.
inline u64* cluster_word(unsigned char* address) {
  scheduling_point();
  for (u32 rank = 0; rank < cluster_size(); rank++) {
    Block& block = cluster_block(rank);
    if (address < block.shared.get() || address + 8 > block.shared.get() + block.launch->config.shared_bytes) continue;
    if (block.ended.load(std::memory_order_acquire))
      fail("CTA %u uses the shared memory of CTA %u, which has ended", self->block->index, block.index);
    return reinterpret_cast<u64*>(address);
  }
  fail("CTA %u uses an address that is in no shared memory of its cluster", self->block->index);
}

inline void cluster_store(unsigned char* to, u64 value) { __atomic_store_n(cluster_word(to), value, STORE_RELAXED); }
inline u64 cluster_load(unsigned char* from) { return __atomic_load_n(cluster_word(from), LOAD_RELAXED); }
inline void cluster_mbarrier_arrive(unsigned char* barrier) { mbarrier_update(cluster_word(barrier), 1, 0); }

inline void cluster_store_async(unsigned char* to, u64 value, unsigned char* landed) {
  if (cluster_size() == 1) fail("an asynchronous store needs a launch with clusters");
  begin({reinterpret_cast<unsigned char*>(cluster_word(to)), nullptr, value, 8, cluster_word(landed)});
}

}  // namespace shim
