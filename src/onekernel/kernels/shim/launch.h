// Runs a kernel over a grid, and the C interface through which Python does so.
#pragma once

namespace shim {

inline void prepare_blocks(Launch& launch) {
  const Config& config = launch.config;
  for (u32 b = 0; b < config.grid; b++) {
    if (b % config.cluster == 0) launch.clusters.push_back(std::make_unique<Cluster>());
    auto block = std::make_unique<Block>();
    block->launch = &launch;
    block->cluster = launch.clusters.back().get();
    block->index = b;
    void* memory = nullptr;
    if (config.shared_bytes && posix_memalign(&memory, 128, config.shared_bytes)) abort();
    if (memory) memset(memory, 0xff, config.shared_bytes);
    block->shared.reset(static_cast<unsigned char*>(memory));
    for (u32 t = 0; t < config.block; t++)
      block->threads.push_back(
          std::make_unique<Thread>(block.get(), t, (u64{config.seed} << 32) + u64{b} * config.block + t + 1));
    for (u32 w = 0; w < config.block / 32; w++) block->warps.push_back(std::make_unique<Warp>());
    launch.blocks.push_back(std::move(block));
  }
}

inline void run(Launch& launch) {
  prepare_blocks(launch);
  std::vector<u32> order(launch.config.grid);
  for (u32 i = 0; i < order.size(); i++) order[i] = i;
  Random random(launch.config.seed + 1);
  for (u32 i = static_cast<u32>(order.size()); i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
  launch.deadline = std::chrono::steady_clock::now() +
                    std::chrono::microseconds(static_cast<long long>(launch.config.timeout_s * 1e6));
  std::vector<std::thread> os_threads;
  for (u32 index : order) start(*launch.blocks[index], os_threads);
  launch.started.store(true, std::memory_order_relaxed);
  for (auto& thread : os_threads) thread.join();
}

// Calls the kernel with values that `args` points to, as cuLaunchKernel would read them.
template <class... Args, size_t... I>
inline void run_kernel(Launch& launch, void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
  (void)args;  // a kernel without parameters has none
  auto call = [=] { kernel(*static_cast<std::remove_reference_t<Args>*>(args[I])...); };
  launch.kernel = &call;
  launch.call = [](const void* kernel) { (*static_cast<const decltype(call)*>(kernel))(); };
  run(launch);
}

template <class... Args>
inline void run_kernel(Launch& launch, void (*kernel)(Args...), void** args) {
  run_kernel(launch, kernel, args, std::index_sequence_for<Args...>{});
}

// The sizes of the parameters, then 0.
template <class... Args>
inline const u32* argument_bytes(void (*)(Args...)) {
  static const u32 bytes[] = {sizeof(Args)..., 0};
  return bytes;
}

}  // namespace shim

// Defines the two C functions of a library that holds one kernel. shim_launch returns 0, or 1 with a message.
#define SHIM_ENTRY(kernel)                                                                          \
  extern "C" const unsigned* shim_argument_bytes() { return shim::argument_bytes(kernel); }         \
  extern "C" int shim_launch(const shim::Config* config, void** args, char* message, size_t size) { \
    shim::Launch launch;                                                                            \
    launch.config = *config;                                                                        \
    shim::run_kernel(launch, kernel, args);                                                         \
    if (size) snprintf(message, size, "%s", launch.message);                                        \
    return launch.failed;                                                                           \
  }
