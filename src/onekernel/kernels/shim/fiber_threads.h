// Device threads as fibers: one OS thread per CTA switches between them whenever one of them yields.
#pragma once

#if !(defined(__x86_64__) && defined(__linux__)) || defined(SHIM_UCONTEXT)
#define SHIM_USES_UCONTEXT 1
#include <ucontext.h>
#endif

namespace shim {

constexpr bool OS_THREADS = false;

void fiber_main();

#ifdef SHIM_USES_UCONTEXT

inline void prepare(Fiber& fiber, void* stack, size_t bytes) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, fiber_main, 0);
  fiber.context = context;
}
inline void swap(Fiber& from, Fiber& to) {
  if (!from.context) from.context = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
}
inline void release(Fiber& fiber) { delete static_cast<ucontext_t*>(fiber.context); }

#else

// swapcontext() saves the signal mask with a system call, 310 ns; this takes 9. The callee-saved registers of the
// System V ABI and the stack pointer are all that a call may expect to survive.
extern "C" void shim_swap(void** save, void* load);
asm(R"(
.text
.globl shim_swap
.type shim_swap, @function
shim_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_swap, .-shim_swap
)");

inline void prepare(Fiber& fiber, void* stack, size_t bytes) {
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + bytes);
  *--top = nullptr;  // the return address of fiber_main, which never returns; it also aligns the stack as a call does
  *--top = reinterpret_cast<void*>(fiber_main);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.context = top;
}
inline void swap(Fiber& from, Fiber& to) { shim_swap(&from.context, to.context); }
inline void release(Fiber&) {}

#endif

// Switches stacks. `last`: nothing will come back to `from`.
inline void switch_fiber(Fiber& from, Fiber& to, bool last = false) {
#ifdef SHIM_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#else
  (void)last;
#endif
  swap(from, to);
#ifdef SHIM_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The next thread in turn, now and then any other; null if all have ended.
inline Thread* choose(Block& block, Random& random, u32 after) {
  u32 count = static_cast<u32>(block.threads.size());
  u32 start = random.one_in(16) ? random.below(count) : after + 1;
  for (u32 i = 0; i < count; i++) {
    Thread* thread = block.threads[(start + i) % count].get();
    if (!thread->done) return thread;
  }
  return nullptr;
}

void progress(Block& block, Random& random);

inline void yield() {
  Thread* me = self;
  Block& block = *me->block;
  check_stop();
  progress(block, me->random);
  // Nothing left to do in this CTA until another one acts, for all we know: let its OS thread run.
  if (++block.turns % (2 * block.threads.size()) == 0) {
    sched_yield();
    check_deadline();
  }
  Thread* next = choose(block, me->random, me->index);
  if (next == me) return;
  self = next;
  switch_fiber(me->fiber, next->fiber);
}

// A place where the seed may let another thread run first.
inline void scheduling_point() {
  if (self->random.one_in(8)) yield();
}

inline void fiber_main() {
  Thread* me = self;
#ifdef SHIM_ADDRESS_SANITIZER
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!me->block->host.stack) {  // the first fiber of a CTA comes from its OS thread's own stack
    me->block->host.stack = stack;
    me->block->host.stack_bytes = bytes;
  }
#endif
  Launch& launch = *me->block->launch;
  try {
    launch.call(launch.kernel);
  } catch (const Stopped&) {
  }
  me->done = true;
  Thread* next = choose(*me->block, me->random, me->index);
  if (next) self = next;
  switch_fiber(me->fiber, next ? next->fiber : me->block->host, true);
}

void finish(Block& block);

inline void run_block(Block& block) {
  constexpr size_t STACK = 256 << 10, GUARD = 16 << 10;  // most of it is never touched
  size_t count = block.threads.size();
  auto* stacks = static_cast<char*>(
      mmap(nullptr, count * (STACK + GUARD), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (stacks == MAP_FAILED) abort();
  for (size_t i = 0; i < count; i++) {
    char* stack = stacks + i * (STACK + GUARD);
    mprotect(stack, GUARD, PROT_NONE);  // a stack that grows too far stops the process instead of its neighbour
    Fiber& fiber = block.threads[i]->fiber;
    fiber.stack = stack + GUARD;
    fiber.stack_bytes = STACK;
    prepare(fiber, stack + GUARD, STACK);
  }
  Random random(block.launch->config.seed + 31 * (block.index + 1));
  if (random.one_in(4)) usleep(random.below(2000));  // CTAs do not all start at once
  self = choose(block, random, random.below(static_cast<u32>(count)));
  switch_fiber(block.host, self->fiber);
  self = block.threads[0].get();
  try {
    finish(block);
  } catch (const Stopped&) {
  }
  for (auto& thread : block.threads) release(thread->fiber);
  release(block.host);
  munmap(stacks, count * (STACK + GUARD));
}

inline void start(Block& block, std::vector<std::thread>& os_threads) {
  os_threads.emplace_back([&block] { run_block(block); });
}

}  // namespace shim
