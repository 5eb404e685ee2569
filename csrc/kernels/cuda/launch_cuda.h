// Launches on a GPU. What returns int returns a cudaError_t.
#pragma once

#include "executor/device/device_launch.h"

namespace pycoll {

/// Launches the operation of one rank on `stream` (a cudaStream_t); returns at once.
int launch_on_cuda(const DeviceLaunch& launch, void* stream);

/// One cooperative launch of `num_launches` ranks on one GPU: `launches` lie in device memory, and
/// differ from `first`, a copy of one of them here, in nothing that a kernel is chosen by.
int launch_together_on_cuda(const DeviceLaunch& first, const DeviceLaunch* launches,
                            int num_launches, void* stream);

/// Blocks of `num_threads` threads of this launch's kernel that the current device holds at once.
int max_resident_blocks_on_cuda(DeviceProtocol protocol, DType dtype, Op op, int num_threads,
                                int* num_blocks);

/// Loads every kernel onto the current device, so that no launch does it while another one spins.
int preload_on_cuda();

/// dst[i] <- src[i] * factor: the first half of premul, before a launch.
int scale_on_cuda(void* dst, const void* src, int64_t count, DType dtype, double factor,
                  void* stream);

/// Counts the patterns that the current device's own conversions (reduce/device_traits.h) do
/// otherwise than the host's. Also in C, for tests: pycoll_check_conversions.
int check_conversions_on_cuda(uint64_t* num_differences);

}  // namespace pycoll
