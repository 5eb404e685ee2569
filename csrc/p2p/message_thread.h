// The thread that progresses asynchronous messages while no other thread waits for one.
//
// It sleeps when nothing is pending. For a while after its last work it looks for work every
// millisecond, so that starting an operation seldom costs a system call that wakes it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "base/thread.h"
#include "transport/ring/segment.h"

namespace pycoll {

class MessageThread {
 public:
  enum class Progress { kIdle, kNotNeeded, kPending, kMoved };

  /// `work` progresses messages, and returns whether there is anything to do.
  MessageThread(Segment& segment, int rank, std::function<Progress()> work, ReportError report)
      : segment_(segment), rank_(rank), work_(std::move(work)), report_(std::move(report)) {}
  ~MessageThread() { stop(); }

  /// Starts the thread or wakes it up. May be called by any thread. Raises SystemError if there is
  /// no thread.
  void wake();
  /// Ends the thread, and joins it unless called by the thread itself.
  void stop();
  bool is_this_thread() const { return std::this_thread::get_id() == id_; }

 private:
  void run();

  Segment& segment_;
  int rank_;
  std::function<Progress()> work_;
  ReportError report_;
  std::mutex start_mutex_;  // held while the thread is started
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<bool> dozing_{false};
  bool stop_ = false;
  bool wake_ = false;
  std::atomic<std::thread::id> id_{};  // set once the thread runs
  std::thread thread_;
};

}  // namespace pycoll
