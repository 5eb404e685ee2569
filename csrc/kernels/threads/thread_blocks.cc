#include "kernels/threads/thread_blocks.h"

#include <memory>
#include <span>
#include <vector>

namespace pycoll {
namespace {

struct BlockOfThreads {
  BlockOfThreads(const DeviceLaunch& its_launch, int its_channel)
      : team(its_launch.num_threads), launch(its_launch), channel(its_channel) {}
  ThreadTeam team;
  BlockShared shared;
  const DeviceLaunch& launch;
  int channel;
};

/// Block and index of one thread.
struct Place {
  BlockOfThreads* block;
  int thread;
};

}  // namespace

void run_blocks(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                ThreadKernel (*kernel_of)(const DeviceLaunch& launch)) {
  std::vector<std::unique_ptr<BlockOfThreads>> blocks;
  std::vector<Place> places;
  for (const DeviceLaunch& launch : std::span(launches, static_cast<size_t>(num_launches))) {
    for (int channel = 0; channel < launch.num_channels; ++channel) {
      blocks.push_back(std::make_unique<BlockOfThreads>(launch, channel));
      for (int thread = 0; thread < launch.num_threads; ++thread) {
        places.push_back({blocks.back().get(), thread});
      }
    }
  }
  pool.run(static_cast<int>(places.size()), [&](int index) {
    const Place& place = places[static_cast<size_t>(index)];
    BlockOfThreads& block = *place.block;
    kernel_of(block.launch)(ThreadEnv(block.team, place.thread), block.launch, block.channel,
                            block.shared);
  });
}

}  // namespace pycoll
