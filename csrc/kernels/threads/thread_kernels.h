// The kernels on CPU threads, one table per protocol, so that they compile in parallel.
#pragma once

#include "executor/device/run_block.h"
#include "executor/device/thread_env.h"

namespace pycoll {

using ThreadKernel = void (*)(const ThreadEnv& env, const DeviceLaunch& launch, int channel,
                              BlockShared& shared);

/// Kernels by dtype; null where there is none.
struct ThreadKernels {
  ThreadKernel kernels[kNumDTypes];
};

template <DeviceProtocol protocol, DType dtype, class Env = ThreadEnv>
constexpr ThreadKernel thread_kernel() {
  if constexpr (!has_kernel(protocol, dtype)) {
    return nullptr;
  } else {
    return [](const ThreadEnv& env, const DeviceLaunch& launch, int channel, BlockShared& shared) {
      BlockRun<protocol, dtype, Env>(Env(env), launch, channel, shared).run();
    };
  }
}
template <DeviceProtocol protocol, class Env = ThreadEnv>
constexpr ThreadKernels make_thread_kernels() {
#define X(id, name, kind, type, acc) thread_kernel<protocol, DType::id, Env>(),
  return {{PYCOLL_FOR_EACH_DTYPE(X)}};
#undef X
}

// CMake makes a file for each from thread_kernels.cc.in.
extern const ThreadKernels kSimpleThreadKernels;
extern const ThreadKernels kLLThreadKernels;
extern const ThreadKernels kLL128ThreadKernels;
extern const ThreadKernels kPoisonThreadKernels;
extern const ThreadKernels kDirectThreadKernels;

}  // namespace pycoll
