#include "kernels/launch_threads.h"

#include <memory>
#include <thread>
#include <vector>

#include "kernels/thread_kernels.h"
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

struct BlockOfThreads {
  explicit BlockOfThreads(int num_threads) : team(num_threads) {}
  ThreadTeam team;
  BlockShared shared;
};

}  // namespace

void launch_on_threads(const DeviceLaunch* launches, int num_launches) {
  std::vector<std::unique_ptr<BlockOfThreads>> blocks;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_launches; ++i) {
    const DeviceLaunch& launch = launches[i];
    const ThreadKernel kernel = kernel_of(launch);
    for (int channel = 0; channel < launch.num_channels; ++channel) {
      BlockOfThreads& block =
          *blocks.emplace_back(std::make_unique<BlockOfThreads>(launch.num_threads));
      for (int thread = 0; thread < launch.num_threads; ++thread) {
        threads.emplace_back([&block, &launch, kernel, channel, thread] {
          kernel(ThreadEnv(block.team, thread), launch, channel, block.shared);
        });
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void scale_on_threads(void* dst, const void* src, int64_t count, DType dtype, double factor) {
  scale_fn(dtype)(dst, src, static_cast<size_t>(count), factor);
}

}  // namespace pycoll
