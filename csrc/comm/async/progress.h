// The progress thread: runs queued operations in order, one at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/thread.h"
#include "comm/async/work.h"

namespace pycoll {

class ProgressThread {
 public:
  explicit ProgressThread(ReportError report);
  ~ProgressThread();  // runs all queued operations: break the communicator first to end them early

  /// Queues an operation. `then` is called when the operation is over and no longer counts as
  /// pending, so that it may let another thread close the communicator.
  std::shared_ptr<Work> submit(std::function<void()> operation, std::function<void()> then = {});
  /// Queues an action of this rank alone, for which no other rank waits.
  std::shared_ptr<Work> submit_local(std::function<void()> action);
  /// True on the progress thread: in functions that a queued operation calls.
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  /// Number of queued and running operations and actions.
  int num_pending() const { return num_pending_.load(std::memory_order_acquire); }
  /// Number of queued and running operations, for which other ranks may wait.
  int num_operations() const { return num_operations_.load(std::memory_order_acquire); }

 private:
  struct Item {
    std::function<void()> operation = {};
    std::function<void()> then = {};
    std::shared_ptr<Work> work = {};
    bool is_local = false;
  };
  std::shared_ptr<Work> push(Item item);
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  bool stop_ = false;
  std::atomic<int> num_pending_{0};
  std::atomic<int> num_operations_{0};
  std::thread thread_;  // last, because it uses the others
};

}  // namespace pycoll
