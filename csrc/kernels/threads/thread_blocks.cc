#include "kernels/threads/thread_blocks.h"

#include <atomic>
#include <memory>
#include <span>
#include <vector>

namespace pycoll {
namespace {

struct BlockOfThreads {
  BlockOfThreads(const DeviceLaunch& its_launch, int its_channel)
      : team(its_launch.num_threads),
        launch(its_launch),
        channel(its_channel),
        num_running(its_launch.num_threads) {}

  /// Runs `kernel` as one of the block's threads.
  void run(ThreadKernel kernel, int thread) {
    kernel(ThreadEnv(team, thread), launch, channel, shared);
  }
  ThreadTeam team;
  BlockShared shared;
  const DeviceLaunch& launch;
  int channel;
  std::atomic<int> num_running;  // threads
};

/// Block and index of one thread.
struct Place {
  BlockOfThreads* block;
  int thread;
  uint64_t block_number;
};

}  // namespace

void run_blocks(const DeviceLaunch* launches, int num_launches, ThreadPool& pool,
                ThreadKernel (*kernel_of)(const DeviceLaunch& launch), const BlockStart* start) {
  std::vector<std::unique_ptr<BlockOfThreads>> blocks;
  std::vector<Place> places;
  for (const DeviceLaunch& launch : std::span(launches, static_cast<size_t>(num_launches))) {
    for (int channel = 0; channel < launch.num_channels; ++channel) {
      blocks.push_back(std::make_unique<BlockOfThreads>(launch, channel));
      for (int thread = 0; thread < launch.num_threads; ++thread) {
        places.push_back({blocks.back().get(), thread, blocks.size() - 1});
      }
    }
  }
  const auto num_blocks = static_cast<int>(blocks.size());
  const bool one_by_one = start != nullptr && !start->together;
  uint64_t first_place = 0;
  if (one_by_one) first_place = start->processors.line_up(num_blocks);
  if (start != nullptr && start->together) {
    start->processors.start(start->processors.line_up(1), num_blocks);
    start->begun();
  }
  pool.run(static_cast<int>(places.size()), [&](int index) {
    const Place& place = places[static_cast<size_t>(index)];
    BlockOfThreads& block = *place.block;
    if (one_by_one) {
      if (place.thread == 0) {
        start->processors.start(first_place + place.block_number, 1);
        if (place.block_number + 1 == blocks.size()) start->begun();
      }
      block.team.sync();
    }
    block.run(kernel_of(block.launch), place.thread);
    if (one_by_one && --block.num_running == 0) start->processors.end(1);
  });
  if (start != nullptr && start->together) start->processors.end(num_blocks);
}

}  // namespace pycoll
