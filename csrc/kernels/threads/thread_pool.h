// Threads that are kept between launches, because creating them takes longer than most launches.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pycoll {

class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ~ThreadPool();

  /// Calls work(0) ... work(num - 1) at the same time, work(0) on the calling thread and each other
  /// one on a thread of its own, and returns when the last one has returned.
  void run(int num, const std::function<void(int)>& work);

 private:
  void run_worker(int index);

  std::mutex mutex_;
  std::condition_variable began_;
  std::condition_variable ended_;
  const std::function<void(int)>* work_ = nullptr;
  uint64_t round_ = 0;
  int num_wanted_ = 0;
  int num_running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pycoll
