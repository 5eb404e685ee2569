#include "kernels/threads/thread_pool.h"

#include "base/thread.h"

namespace pycoll {

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  began_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int num, const std::function<void(int)>& work) {
  std::unique_lock lock(mutex_);
  while (static_cast<int>(threads_.size()) < num - 1) {
    const auto index = static_cast<int>(threads_.size()) + 1;
    threads_.push_back(
        start_thread("a thread of an emulated device", [this, index] { run_worker(index); }, {}));
  }
  work_ = &work;
  num_wanted_ = num;
  num_running_ = num - 1;
  ++round_;
  began_.notify_all();
  lock.unlock();
  work(0);
  lock.lock();
  ended_.wait(lock, [this] { return num_running_ == 0; });
}

void ThreadPool::run_worker(int index) {
  std::unique_lock lock(mutex_);
  for (uint64_t seen = 0;;) {
    began_.wait(lock, [&] { return stop_ || (round_ != seen && index < num_wanted_); });
    if (stop_) return;
    seen = round_;
    const std::function<void(int)>& work = *work_;
    lock.unlock();
    work(index);
    lock.lock();
    if (--num_running_ == 0) ended_.notify_one();
  }
}

}  // namespace pycoll
