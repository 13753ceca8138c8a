// Device threads as OS threads, for ThreadSanitizer. Waits poll with sched_yield(), and threads share no lock and no
// reference count: these would order accesses that the kernel itself does not order, and hide the race that this build
// is for.
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
  block.running = static_cast<u32>(block.threads.size());
  for (auto& thread : block.threads) {
    os_threads.emplace_back([thread = thread.get()] {
      self = thread;
      Block& block = *thread->block;
      Launch& launch = *block.launch;
      while (!launch.started.load(std::memory_order_relaxed)) sched_yield();
      try {
        launch.call(launch.kernel);
        if (block.running.fetch_sub(1) == 1) finish(block);
      } catch (const Stopped&) {
      }
    });
  }
}

}  // namespace shim
