// Where work of an emulated device waits for its start: the queues that streams share, and the
// blocks that the device holds at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace pycoll {

/// A queue of the hardware. Streams beyond CUDA_DEVICE_MAX_CONNECTIONS share one: work that waits
/// for its stream then holds up the work of other streams behind it, as on a GPU.
class ThreadQueue {
 public:
  /// Returns the place of new work, behind all earlier work.
  uint64_t enter() {
    const std::lock_guard lock(mutex_);
    return num_entered_++;
  }
  /// Waits until all work before `place` has begun.
  void wait(uint64_t place) {
    std::unique_lock lock(mutex_);
    moved_.wait(lock, [&] { return num_begun_ == place; });
  }
  /// Called once for each place, when its work has begun.
  void pass() {
    const std::lock_guard lock(mutex_);
    ++num_begun_;
    moved_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable moved_;
  uint64_t num_entered_ = 0;
  uint64_t num_begun_ = 0;
};

/// The blocks that are resident on a device. Blocks start in the order of their places, and only
/// where there is room.
class ThreadProcessors {
 public:
  explicit ThreadProcessors(int num_blocks) : num_blocks_(num_blocks), num_free_(num_blocks) {}

  int num_blocks() const { return num_blocks_; }
  /// Returns the first of `num_places` places in the order of starts.
  uint64_t line_up(int num_places) {
    const std::lock_guard lock(mutex_);
    const uint64_t first = num_places_;
    num_places_ += static_cast<uint64_t>(num_places);
    return first;
  }
  /// Waits until all blocks at earlier places have started and there is room for `num_blocks`.
  void start(uint64_t place, int num_blocks) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_started_ == place && num_free_ >= num_blocks; });
    ++num_started_;
    num_free_ -= num_blocks;
    changed_.notify_all();
  }
  void end(int num_blocks) {
    const std::lock_guard lock(mutex_);
    num_free_ += num_blocks;
    changed_.notify_all();
  }

 private:
  const int num_blocks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_free_;
  uint64_t num_places_ = 0;
  uint64_t num_started_ = 0;
};

}  // namespace pycoll
