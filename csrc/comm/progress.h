// The progress thread: runs queued operations in their order, one at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/work.h"

namespace pycoll {

class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();  // finishes what is queued: break the communicator first to end it early

  std::shared_ptr<Work> submit(std::function<void()> operation);
  /// True for what a queued operation calls.
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  /// Operations that are queued or running.
  int num_pending() const { return num_pending_.load(std::memory_order_acquire); }

 private:
  struct Item {
    std::function<void()> operation;
    std::shared_ptr<Work> work;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  bool stop_ = false;
  std::atomic<int> num_pending_{0};
  std::thread thread_;  // last: it uses the others
};

}  // namespace pycoll
