// The progress thread: runs queued operations in their order, one at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/async/work.h"

namespace pycoll {

class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();  // finishes what is queued: break the communicator first to end it early

  /// `then` is called when the operation is over and does not count as pending any more: who
  /// hears of its end by it may close the communicator at once.
  std::shared_ptr<Work> submit(std::function<void()> operation, std::function<void()> then = {});
  /// The same for what concerns this rank alone.
  std::shared_ptr<Work> submit_local(std::function<void()> action);
  /// True for what a queued operation calls.
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  /// What is queued or running.
  int num_pending() const { return num_pending_.load(std::memory_order_acquire); }
  /// Of these, operations: other ranks may wait for them.
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
  std::thread thread_;  // last: it uses the others
};

}  // namespace pycoll
