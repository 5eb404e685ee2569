#include "p2p/message_thread.h"

namespace pycoll {
namespace {

constexpr int kIdleNapsBeforeSleep = 100;

}  // namespace

void MessageThread::wake() {
  {
    const std::lock_guard lock(start_mutex_);
    if (!thread_.joinable()) {
      thread_ = start_thread("the thread of asynchronous messages", [this] { run(); }, report_);
    }
  }
  if (!dozing_) return;
  {
    const std::lock_guard lock(mutex_);
    wake_ = true;
  }
  woken_.notify_all();
}

void MessageThread::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  woken_.notify_all();
  segment_.ring_message_bell(rank_);
  if (is_this_thread()) return;
  thread_.join();
}

void MessageThread::run() {
  id_ = std::this_thread::get_id();
  int num_idle = 0;
  for (;;) {
    const Progress progress = work_();
    num_idle = progress == Progress::kIdle ? num_idle + 1 : 0;
    {
      std::unique_lock lock(mutex_);
      if (num_idle > kIdleNapsBeforeSleep) {
        // Sets the flag first, then looks for work once more. A thread that starts an operation
        // does the opposite, so that at least one of the two sees the other.
        dozing_ = true;
        if (work_() == Progress::kIdle) woken_.wait(lock, [this] { return stop_ || wake_; });
        dozing_ = false;
        wake_ = false;
        num_idle = 0;
      }
      if (stop_) return;
    }
    if (progress != Progress::kMoved)
      segment_.nap_for_message(rank_, progress == Progress::kPending);
  }
}

}  // namespace pycoll
