// The blocks of launches as teams of CPU threads.
#pragma once

#include "kernels/threads/thread_kernels.h"
#include "kernels/threads/thread_pool.h"

namespace pycoll {

/// Runs all blocks of the launches at once, each with the kernel that `kernel_of` returns for its
/// launch, and returns when all threads have ended.
void run_blocks(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                ThreadKernel (*kernel_of)(const DeviceLaunch& launch));

}  // namespace pycoll
