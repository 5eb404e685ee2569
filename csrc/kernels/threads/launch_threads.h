// Launches on host threads: each block of a launch is a team of std::threads.
#pragma once

#include "executor/device/device_launch.h"
#include "kernels/threads/thread_pool.h"

namespace pycoll {

/// Runs the launches of `num_launches` ranks at once, as one cooperative launch does, and returns
/// when all threads have ended. Failures are in the reports.
void launch_on_threads(const DeviceLaunch* launches, int num_launches, ThreadPool& pool);

/// dst[i] <- src[i] * factor: the first half of premul, before a launch.
void scale_on_threads(void* dst, const void* src, int64_t count, DType dtype, double factor);

}  // namespace pycoll
