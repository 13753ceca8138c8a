// Words in global memory that several CTAs use, and the CTA's barriers.
//
// A relaxed store may stay invisible to other CTAs for a while, and two of them to different words may become visible
// in either order: that is how a tag that was meant to guard other words is caught. A release, a fence or the end of
// the CTA makes all earlier ones visible.
#pragma once

namespace shim {

enum class Order { RELAXED, ACQUIRE, RELEASE };

// ThreadSanitizer does not see fences, so there every word orders what its writer did before.
constexpr int LOAD_RELAXED = OS_THREADS ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
constexpr int STORE_RELAXED = OS_THREADS ? __ATOMIC_RELEASE : __ATOMIC_RELAXED;
constexpr int UPDATE = __ATOMIC_ACQ_REL;

inline void perform(const PendingStore& store) {
  if (store.bytes == 4)
    __atomic_store_n(static_cast<u32*>(store.to), static_cast<u32>(store.value), STORE_RELAXED);
  else
    __atomic_store_n(static_cast<u64*>(store.to), store.value, STORE_RELAXED);
}

// Makes the oldest pending store to `word` visible, or with null all of them: stores to one word never change places.
inline void flush(Block& block, const void* word = nullptr) {
  auto& stores = block.stores;
  for (size_t i = 0; i < stores.size();) {
    if (word && stores[i].to != word) {
      i++;
      continue;
    }
    perform(stores[i]);
    stores.erase(stores.begin() + static_cast<ptrdiff_t>(i));
  }
}

inline void fence() {
  flush(*self->block);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class T>
inline T load(const T* from, Order order) {
  scheduling_point();
  flush(*self->block, from);
  return order == Order::ACQUIRE ? __atomic_load_n(from, __ATOMIC_ACQUIRE) : __atomic_load_n(from, LOAD_RELAXED);
}

template <class T>
inline void store(T* to, T value, Order order) {
  scheduling_point();
  Block& block = *self->block;
  flush(block, order == Order::RELEASE ? nullptr : to);
  if (order == Order::RELEASE)
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
  else if (!OS_THREADS && block.stores.size() < 16 && self->random.one_in(2))
    block.stores.push_back({to, value, sizeof value});
  else
    perform({to, value, sizeof value});
}

// Returns what the word was before.
template <class T>
inline T add(T* to, T value, Order order) {
  scheduling_point();
  flush(*self->block, order == Order::RELEASE ? nullptr : to);
  return __atomic_fetch_add(to, value, order == Order::RELEASE ? __ATOMIC_RELEASE : STORE_RELAXED);
}

// Raises the word to a value.
inline void raise(u32* to, u32 value) {
  scheduling_point();
  flush(*self->block, to);
  for (u32 seen = __atomic_load_n(to, __ATOMIC_RELAXED); seen < value;)
    if (__atomic_compare_exchange_n(to, &seen, value, false, STORE_RELAXED, __ATOMIC_RELAXED)) return;
}

inline u64 compare_and_swap(u64* word, u64 expected, u64 wanted) {
  scheduling_point();
  flush(*self->block, word);
  __atomic_compare_exchange_n(word, &expected, wanted, false, UPDATE, __ATOMIC_ACQUIRE);
  return expected;
}

// Counts the caller in and returns the generation to wait for the end of.
inline u32 meet(Barrier& barrier, u32 count, bool predicate = false) {
  u32 generation = barrier.generation.load(std::memory_order_acquire);
  if (predicate) barrier.any[generation % 2].store(1, std::memory_order_relaxed);
  if (barrier.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    barrier.arrived.store(0, std::memory_order_relaxed);
    barrier.expected.store(0, std::memory_order_relaxed);
    barrier.any[(generation + 1) % 2].store(0, std::memory_order_relaxed);
    barrier.generation.store(generation + 1, std::memory_order_release);
  }
  return generation;
}

inline bool passed(const Barrier& barrier, u32 generation) {
  return barrier.generation.load(std::memory_order_acquire) != generation;
}

inline u32 barrier_join(u32 id, u32 threads, bool predicate) {
  scheduling_point();
  if (id > 15 || threads == 0 || threads % 32 || threads > self->block->threads.size())
    fail("barrier %u for %u threads: the number is at most 15, the threads a multiple of 32 in the CTA", id, threads);
  Barrier& barrier = self->block->barriers[id];
  u32 others = 0;
  if (!barrier.expected.compare_exchange_strong(others, threads) && others != threads)
    fail("CTA %u meets at barrier %u with %u threads and with %u", self->block->index, id, others, threads);
  return meet(barrier, threads, predicate);
}

inline bool barrier_any(u32 id, u32 threads, bool predicate) {
  u32 generation = barrier_join(id, threads, predicate);
  Barrier& barrier = self->block->barriers[id];
  static const char* const NAMES[16] = {
      "barrier 0", "barrier 1", "barrier 2",  "barrier 3",  "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
      "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
  wait_until(NAMES[id], [&] { return passed(barrier, generation); });
  return barrier.any[generation % 2].load(std::memory_order_relaxed);
}

inline void barrier_sync(u32 id, u32 threads) { barrier_any(id, threads, false); }
inline void barrier_arrive(u32 id, u32 threads) { barrier_join(id, threads, false); }

inline u64 nanoseconds() {
  return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

}  // namespace shim
