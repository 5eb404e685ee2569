// Launches on a GPU. A result of type int is a cudaError_t.
#pragma once

#include "device/device_table.h"
#include "executor/device/device_launch.h"

namespace pycoll {

/// Launches the operation of one rank on `stream` (a cudaStream_t); returns at once.
int launch_on_cuda(const DeviceLaunch& launch, void* stream);

/// One cooperative launch of `num_launches` ranks on one GPU. `launches` lie in device memory;
/// `first` is a copy of one of them on the host. All need the same kernel.
int launch_together_on_cuda(const DeviceLaunch& first, const DeviceLaunch* launches,
                            int num_launches, void* stream);

/// Number of blocks of `num_threads` threads that fit on the current device, whichever kernel they
/// run.
int max_resident_blocks_on_cuda(int num_threads, int* num_blocks);

/// DeviceTable::store_words and await_words.
int store_words_on_cuda(const DeviceWords& words, void* stream);
int await_words_on_cuda(const DeviceWords& words, int64_t timeout_ns, uint64_t* found,
                        void* stream);

/// Loads every kernel onto the current device, so that no launch does so while another one waits.
int preload_on_cuda();

/// dst[i] <- src[i] * factor: the scaling step of premul, before a launch.
int scale_on_cuda(void* dst, const void* src, int64_t count, DType dtype, double factor,
                  void* stream);

/// Counts the patterns that the current device's instructions (reduce/device_traits.h) convert
/// differently from the CPU. Also exported in C, for tests: pycoll_check_conversions.
int check_conversions_on_cuda(uint64_t* num_differences);

}  // namespace pycoll
