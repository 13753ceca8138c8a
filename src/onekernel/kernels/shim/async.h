// mbarriers and what completes on them: bulk copies that land at some later yield, their target poisoned until then.
#pragma once

namespace shim {

// An mbarrier's 64 bits: parity of the current phase | pending arrivals | arrivals per phase | missing bytes + BIAS |
// MARK, which tells an initialised word from any other. One word, so that a compare-and-swap updates it.
constexpr int PENDING = 1, ARRIVALS = 21, MISSING = 41;
constexpr u64 COUNT_MASK = (1u << 20) - 1, MISSING_MASK = (1u << 21) - 1, BIAS = 1u << 20, MARK = 1ull << 62;

inline void mbarrier_init(u64* barrier, u32 arrivals) {
  if (arrivals == 0 || arrivals > COUNT_MASK) fail("an mbarrier cannot expect %u arrivals", arrivals);
  u64 word = MARK | BIAS << MISSING | u64{arrivals} << ARRIVALS | u64{arrivals} << PENDING;
  __atomic_store_n(barrier, word, STORE_RELAXED);
}

inline u64 mbarrier_read(const u64* barrier) {
  u64 word = __atomic_load_n(barrier, __ATOMIC_ACQUIRE);
  if (word >> 62 != 1)
    fail("CTA %u uses an mbarrier that nobody initialised, or that was overwritten", self->block->index);
  return word;
}

inline void mbarrier_update(u64* barrier, u32 arrivals, long long bytes) {
  u64 old = mbarrier_read(barrier), wanted;
  do {
    u64 parity = old & 1, pending = old >> PENDING & COUNT_MASK, each = old >> ARRIVALS & COUNT_MASK;
    long long missing = static_cast<long long>(old >> MISSING & MISSING_MASK) - static_cast<long long>(BIAS) + bytes;
    if (arrivals > pending)
      fail("CTA %u: more arrivals at an mbarrier than the %llu it expects", self->block->index, each);
    if (missing >= static_cast<long long>(BIAS) || missing <= -static_cast<long long>(BIAS))
      fail("CTA %u: an mbarrier counts at most 1,048,575 bytes", self->block->index);
    pending -= arrivals;
    if (pending == 0 && missing == 0) {
      parity ^= 1;
      pending = each;
    }
    wanted = MARK | (static_cast<u64>(missing) + BIAS) << MISSING | each << ARRIVALS | pending << PENDING | parity;
  } while (!__atomic_compare_exchange_n(barrier, &old, wanted, false, UPDATE, __ATOMIC_ACQUIRE));
}

inline void mbarrier_arrive(u64* barrier, u32 arrivals, u32 bytes) {
  scheduling_point();
  mbarrier_update(barrier, arrivals, bytes);
}

inline bool mbarrier_test(const u64* barrier, u32 parity) {
  scheduling_point();
  return (mbarrier_read(barrier) & 1) != (parity & 1);
}

inline void poison(const Transfer& transfer) {
  memset(transfer.to, 0xff, transfer.bytes);  // NaN as bf16 and as float
#ifdef SHIM_ADDRESS_SANITIZER
  __asan_poison_memory_region(transfer.to, transfer.bytes);
#endif
}

inline void land(const Transfer& transfer) {
#ifdef SHIM_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(transfer.to, transfer.bytes);
#endif
  if (transfer.from)
    memcpy(transfer.to, transfer.from, transfer.bytes);
  else
    __atomic_store_n(reinterpret_cast<u64*>(transfer.to), transfer.value, STORE_RELAXED);
  mbarrier_update(transfer.landed, 0, -static_cast<long long>(transfer.bytes));
}

inline void begin(const Transfer& transfer) {
  if (OS_THREADS)
    land(transfer);
  else
    self->block->transfers.push_back(transfer);
}

inline void bulk_prefetch(const void* from, u32 bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16)
    fail("CTA %u: a bulk access of %u bytes at %p; all must be multiples of 16", self->block->index, bytes, from);
}

inline void prefetch(const void* from) {
  if (from == nullptr) fail("CTA %u: a prefetch of nothing", self->block->index);
}

inline void bulk_copy(void* to, const void* from, u32 bytes, u64* landed) {
  scheduling_point();
  bulk_prefetch(from, bytes);
  bulk_prefetch(to, bytes);
  Block& block = *self->block;
  auto offset = static_cast<unsigned char*>(to) - block.shared.get();
  if (offset < 0 || static_cast<u64>(offset) + bytes > block.launch->config.shared_bytes)
    fail("CTA %u: a bulk copy of %u bytes to offset %td leaves its %llu bytes of shared memory", block.index, bytes,
         offset, block.launch->config.shared_bytes);
  Transfer transfer{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), 0, bytes, landed};
  if (!OS_THREADS) poison(transfer);
  begin(transfer);
}

// What happens by itself while threads run: some copy lands, some relaxed store becomes visible. In no particular
// order, and on average once in as many yields as there are threads, so that each of them may look before and after.
[[maybe_unused]] inline void progress(Block& block, Random& random) {
  const u32 threads = static_cast<u32>(block.threads.size());
  if (!block.transfers.empty() && random.one_in(threads)) {
    size_t i = random.below(static_cast<u32>(block.transfers.size()));
    Transfer transfer = block.transfers[i];
    block.transfers.erase(block.transfers.begin() + static_cast<ptrdiff_t>(i));
    land(transfer);
  }
  if (!block.stores.empty() && random.one_in(threads)) {
    const void* word = block.stores[random.below(static_cast<u32>(block.stores.size()))].to;
    auto oldest = std::find_if(block.stores.begin(), block.stores.end(), [&](auto& store) { return store.to == word; });
    perform(*oldest);
    block.stores.erase(oldest);
  }
}

// The end of a CTA.
inline void finish(Block& block) {
  flush(block);
  block.ended.store(true, std::memory_order_release);
  if (!block.launch->failed)
    for (auto& thread : block.threads) check_copies(*thread);
  if (!block.transfers.empty() && !block.launch->failed)
    fail("CTA %u ended while %zu bulk copies into its shared memory were on their way", block.index,
         block.transfers.size());
}

}  // namespace shim
