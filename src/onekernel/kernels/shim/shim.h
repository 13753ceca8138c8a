// Runs kernel sources on the CPU. The generated translation unit includes this file first, then the kernel:
//
//   one OS thread per CTA, all CTAs alive at once; one fiber per device thread (fiber_threads.h), or with
//   SHIM_OS_THREADS one OS thread per device thread (os_threads.h), which is what ThreadSanitizer can watch;
//   every wrapper in ptx/ has a CPU branch that calls a function of this namespace.
//
// It shows logic faults: deadlocks, early reuse, missing waits, wrong counts, overflows. A seed decides which thread
// runs next, when copies land and when relaxed stores become visible. Not modelled: the full memory model, divergence
// inside a warp, registers, speed.
#pragma once

#ifdef __APPLE__  // without these its <ucontext.h> is empty, or hides what is not POSIX
#define _XOPEN_SOURCE 600
#define _DARWIN_C_SOURCE
#endif

// All standard headers come before the CUDA keywords: some of them use names like __noinline__ themselves.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shim/state.h"
#ifdef SHIM_OS_THREADS
#include "shim/os_threads.h"
#else
#include "shim/fiber_threads.h"
#endif
#include "shim/memory.h"
#include "shim/copies.h"
#include "shim/async.h"
#include "shim/warp.h"
#include "shim/cluster.h"
#include "shim/launch.h"
#include "shim/dialect.h"
