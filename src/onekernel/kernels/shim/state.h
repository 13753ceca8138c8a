// What exists during a launch: the launch, its CTAs, their warps and threads, and how all of them stop on a failure.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define SHIM_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHIM_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef SHIM_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {

using u32 = unsigned int;
using u64 = unsigned long long;

// xorshift64*; a thread's own, so that the order of one CTA's threads follows from the seed alone.
class Random {
 public:
  explicit Random(u64 seed) : state_(seed * 0x9E3779B97F4A7C15ull | 1) {
    for (int i = 0; i < 4; i++) next();
  }
  u32 below(u32 limit) { return static_cast<u32>((next() >> 32) % limit); }
  bool one_in(u32 n) { return below(n) == 0; }

 private:
  u64 next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Dull;
  }
  u64 state_;
};

// A counter that opens for all when the last one comes, then starts again. `any` collects their predicates.
struct Barrier {
  std::atomic<u32> expected{0}, arrived{0}, generation{0}, any[2]{};
};

// Two slots per lane, used in turn: a lane can be at most one collective ahead of another, so one meeting is enough.
struct Warp {
  Barrier barrier;
  alignas(16) unsigned char slots[2][32][32];
  const char* operations[2][32];
};

// A bulk copy, or a stored word, on its way to shared memory.
struct Transfer {
  unsigned char* to;
  const unsigned char* from;  // null: `value`
  u64 value;
  u32 bytes;
  u64* landed;
};

// 16 bytes on their way to shared memory, of one thread's group `group`.
struct Copy {
  unsigned char* to;
  const unsigned char* from;  // null: zeros
  u32 group;
};

struct PendingStore {
  void* to;
  u64 value;
  u32 bytes;
};

// A stack to switch to. The members before `context` serve AddressSanitizer, which has to be told.
struct Fiber {
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  void* context = nullptr;
};

struct Block;

struct Thread {
  Thread(Block* of, u32 number, u64 seed) : block(of), index(number), random(seed) {}
  Block* block;
  u32 index;
  Random random;
  Fiber fiber;
  u32 collectives = 0, cluster_generation = 0, turns = 0;
  std::vector<Copy> copies;
  u32 copy_groups = 0;
  bool done = false;
  std::atomic<const char*> waits_for{nullptr};
};

struct Cluster {
  Barrier barrier;
};

struct FreeShared {
  void operator()(unsigned char* memory) const { free(memory); }
};

struct Launch;

struct Block {
  Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  u32 index = 0;
  std::unique_ptr<unsigned char, FreeShared> shared;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[16];
  std::vector<Transfer> transfers;   // fibers only: with OS threads a transfer is done at once
  std::vector<PendingStore> stores;  // fibers only, likewise
  Fiber host;
  u32 turns = 0;
  std::atomic<u32> running{0};  // OS threads only
  std::atomic<bool> ended{false};
};

struct Config {
  u32 grid, block, cluster;
  u32 seed;
  u64 shared_bytes;
  double timeout_s;
};

struct Launch {
  Config config;
  void (*call)(const void*) = nullptr;  // runs the kernel once, for the calling thread
  const void* kernel = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::chrono::steady_clock::time_point deadline;
  std::atomic<bool> started{false}, failed{false};
  std::mutex mutex;
  char message[1024] = "";
};

// Unwinds a device thread after the launch has failed.
struct Stopped {};

inline thread_local Thread* self = nullptr;

inline void record_failure(Launch& launch, const char* format, va_list values) {
  std::lock_guard<std::mutex> guard(launch.mutex);
  if (!launch.failed) {
    vsnprintf(launch.message, sizeof launch.message, format, values);
    launch.failed = true;
  }
}

// Ends the launch with a message; the first one wins.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  record_failure(*self->block->launch, format, values);
  va_end(values);
  throw Stopped{};
}

// Says what every thread of the launch waits for, in groups: the answer to 'why does it hang'.
[[noreturn]] inline void fail_timeout() {
  Launch& launch = *self->block->launch;
  char text[800];
  size_t used = 0;
  for (auto& block : launch.blocks) {
    for (size_t i = 0; i < block->threads.size() && used < sizeof text - 80;) {
      const char* what = block->threads[i]->waits_for;
      size_t end = i + 1;
      while (end < block->threads.size() && block->threads[end]->waits_for == what) end++;
      if (what)
        used += static_cast<size_t>(snprintf(text + used, sizeof text - used, "; CTA %u threads %zu-%zu: %s",
                                             block->index, i, end - 1, what));
      i = end;
    }
  }
  text[std::min(used, sizeof text - 1)] = 0;
  fail("the kernel did not end within %g s%s", launch.config.timeout_s, text);
}

inline void check_stop() {
  Launch& launch = *self->block->launch;
  if (launch.failed.load(std::memory_order_relaxed)) throw Stopped{};
}

inline void check_deadline() {
  if (std::chrono::steady_clock::now() > self->block->launch->deadline) fail_timeout();
}

void yield();

template <class Ready>
inline void wait_until(const char* what, Ready ready) {
  while (!ready()) {
    self->waits_for.store(what, std::memory_order_relaxed);
    yield();
  }
  self->waits_for.store(nullptr, std::memory_order_relaxed);
}

struct Index {
  u32 x, y, z;
};
inline Index thread_index() { return {self->index, 0, 0}; }
inline Index block_index() { return {self->block->index, 0, 0}; }
inline Index block_dim() { return {self->block->launch->config.block, 1, 1}; }
inline Index grid_dim() { return {self->block->launch->config.grid, 1, 1}; }
inline u32 lane() { return self->index % 32; }
inline unsigned char* shared_memory() { return self->block->shared.get(); }

}  // namespace shim
