// Launches on CPU threads: each block of a launch is a team of std::threads.
#pragma once

#include "executor/device/device_launch.h"
#include "kernels/threads/thread_blocks.h"

namespace pycoll {

/// Raises UsageError if there is no kernel for the launch's protocol and dtype in this build.
void require_kernel(const DeviceLaunch& launch);

/// Runs the launches of `num_launches` ranks at once, like a cooperative launch, and returns when
/// all threads have ended. The reports receive the failures. `start` as for run_blocks().
void launch_on_threads(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                       const BlockStart* start = nullptr);

/// dst[i] <- src[i] * factor: the scaling step of premul, before a launch.
void scale_on_threads(void* dst, const void* src, int64_t count, DType dtype, double factor);

}  // namespace pycoll
