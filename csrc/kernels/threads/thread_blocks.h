// The blocks of launches as teams of CPU threads.
#pragma once

#include <functional>

#include "kernels/threads/thread_kernels.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/thread_queue.h"

namespace pycoll {

/// How the blocks of a launch start on a device.
struct BlockStart {
  ThreadProcessors& processors;
  bool together;                // all blocks at once, or each one when there is room
  std::function<void()> begun;  // called when all blocks have started
};

/// Runs all blocks of the launches at once, each with the kernel that `kernel_of` returns for its
/// launch, and returns when all threads have ended. `start`: null if there is room for all.
void run_blocks(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                ThreadKernel (*kernel_of)(const DeviceLaunch& launch),
                const BlockStart* start = nullptr);

}  // namespace pycoll
