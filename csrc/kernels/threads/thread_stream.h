// Streams, events and graphs of the emulated device. A stream is a thread that runs its tasks in
// order, each when it is its turn in the stream's hardware queue; an event counts how often it was
// recorded, and how many of these records were reached.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/thread.h"
#include "kernels/threads/thread_pool.h"
#include "kernels/threads/thread_queue.h"

namespace pycoll {

using ThreadTask = std::function<void()>;

/// Tasks that are recorded instead of run, in an order that keeps the order of each stream.
struct ThreadCapture {
  uint64_t number;
  class ThreadStream* origin;
  std::vector<ThreadTask> tasks;
  std::vector<class ThreadStream*> streams;
};

class ThreadEvent {
 public:
  void record(ThreadStream& stream);
  void hold(ThreadStream& stream);
  bool is_over();
  void synchronize();

 private:
  struct Count {
    std::mutex mutex;
    std::condition_variable reached;
    uint64_t done = 0;
    std::string error;  // of the stream
  };
  void refuse_captured() const;

  // Shared with the tasks, which may run after the event is destroyed.
  std::shared_ptr<Count> count_ = std::make_shared<Count>();
  std::atomic<uint64_t> recorded_{0};
  std::shared_ptr<ThreadCapture> capture_;  // the capture of the last record, if any
};

class ThreadStream {
 public:
  ThreadStream(int device, ThreadQueue& queue) : device_(device), hardware_(queue) {}
  ~ThreadStream();  // runs the remaining tasks
  ThreadStream(const ThreadStream&) = delete;

  int device() const { return device_; }
  /// Runs `task` after all earlier tasks, or records it during a capture.
  void push(ThreadTask task);
  /// Waits until all earlier tasks are done. Raises UsageError while the stream is captured, and
  /// SystemError from the first task on that failed.
  void synchronize();
  /// What the first task that failed has raised; empty: none has.
  std::string error();

  /// The task that a stream's thread runs.
  class Running {
   public:
    explicit Running(ThreadStream& stream) : stream_(stream) { current_ = this; }
    ~Running() {
      pass();
      current_ = nullptr;
    }
    Running(const Running&) = delete;
    /// Called by a task that has begun, as a kernel does whose blocks are all resident: the next
    /// work in the hardware queue may begin. Without a call it begins when the task has ended.
    void pass() {
      if (!passed_.exchange(true)) stream_.hardware_.pass();
    }
    /// The threads of the stream's kernels.
    ThreadPool& pool() { return stream_.pool_; }
    /// That of this thread; null: this is not the thread of a stream.
    static Running* current() { return current_; }

   private:
    static inline thread_local Running* current_ = nullptr;
    ThreadStream& stream_;
    std::atomic<bool> passed_{false};
  };

  void begin_capture();
  /// Raises UsageError unless the capture began in this stream.
  std::shared_ptr<ThreadCapture> end_capture();
  const std::shared_ptr<ThreadCapture>& capture() const { return capture_; }
  void join_capture(std::shared_ptr<ThreadCapture> capture);
  /// True when some stream of this process is captured. Meanwhile allocations and waits are not
  /// allowed, as in CUDA's global capture mode.
  static bool any_capture() { return num_captures_ != 0; }
  /// True when this thread has begun a capture. Meanwhile it may not query events, as in CUDA's
  /// thread-local capture mode.
  static bool captures_here() { return num_captures_here_ != 0; }

 private:
  void run();

  static inline std::atomic<int> num_captures_{0};
  static inline thread_local int num_captures_here_ = 0;

  struct Queued {
    ThreadTask task;
    uint64_t place;  // in the hardware queue
  };

  const int device_;
  ThreadQueue& hardware_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Queued> queue_;
  uint64_t num_pushed_ = 0;
  uint64_t num_done_ = 0;
  bool stop_ = false;
  std::string error_;
  std::shared_ptr<ThreadCapture> capture_;
  ThreadPool pool_;     // grows to the largest launch of this stream
  std::thread thread_;  // started by the first task
};

}  // namespace pycoll
