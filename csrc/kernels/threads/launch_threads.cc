#include "kernels/threads/launch_threads.h"

#include <string>

#include "base/error.h"
#include "reduce/reduce_copy.h"

namespace pycoll {
namespace {

ThreadKernel kernel_of(const DeviceLaunch& launch) {
  const ThreadKernels* const by_protocol[] = {&kSimpleThreadKernels, &kLLThreadKernels,
                                              &kLL128ThreadKernels, &kPoisonThreadKernels,
                                              &kDirectThreadKernels};
  static_assert(std::size(by_protocol) == kNumDeviceProtocols);
  return by_protocol[static_cast<size_t>(launch.protocol)]
      ->kernels[static_cast<size_t>(launch.dtype)];
}

}  // namespace

void require_kernel(const DeviceLaunch& launch) {
  if (kernel_of(launch) != nullptr) return;
  throw UsageError("this build has no kernel for " + std::string(dtype_name(launch.dtype)) +
                   " with protocol " + std::to_string(static_cast<int>(launch.protocol)));
}

void launch_on_threads(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                       const BlockStart* start) {
  run_blocks(launches, num_launches, pool, kernel_of, start);
}

void scale_on_threads(void* dst, const void* src, int64_t count, DType dtype, double factor) {
  scale_fn(dtype)(dst, src, static_cast<size_t>(count), factor);
}

}  // namespace pycoll
