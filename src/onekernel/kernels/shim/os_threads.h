// Device threads as OS threads, for ThreadSanitizer. Waits poll with sched_yield() and take no lock: a lock would order
// accesses that the kernel itself does not order, and hide the race that this build is for.
#pragma once

namespace shim {

constexpr bool OS_THREADS = true;

inline void yield() {
  check_stop();
  if (++self->turns % 1024 == 0) check_deadline();
  sched_yield();
}

inline void scheduling_point() {
  if (self->random.one_in(64)) yield();
}

void finish(Block& block);

inline void start(Block& block, std::vector<std::thread>& os_threads) {
  auto remaining = std::make_shared<std::atomic<size_t>>(block.threads.size());
  for (auto& thread : block.threads) {
    os_threads.emplace_back([thread = thread.get(), remaining] {
      self = thread;
      Launch& launch = *thread->block->launch;
      try {
        launch.call(launch.kernel);
        if (remaining->fetch_sub(1) == 1) finish(*thread->block);
      } catch (const Stopped&) {
      }
    });
  }
}

}  // namespace shim
