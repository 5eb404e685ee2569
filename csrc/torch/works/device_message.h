// torch's handle on a send or receive of a device tensor. Large ones go from device to device where
// the core can do that, others through CPU memory. Streams and threads wait for each other; the
// caller does not wait.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>

#include "torch/works/message_work.h"
#include "torch/works/stream_work.h"

namespace pycoll::torch_backend {

/// Starts messages on a thread after their events have occurred, in the order of submission. A
/// forked process does not have the thread and does not destroy the object.
class MessageStarter {
 public:
  ~MessageStarter();

  /// Starts a message, or ends it with an error.
  using Start = std::function<void(const pycoll_error*)>;

  /// Calls `start` on the starter's thread after the event `after`, or at once on this thread where
  /// there is no event and no message is waiting. Passes an error if there is no thread, or the
  /// event failed.
  void start(std::optional<c10::Event> after, Start start);

 private:
  struct Waiting {
    std::optional<c10::Event> after;
    Start start;
  };
  void run();
  /// Starts the thread unless it runs; the error if there is none. Needs the lock.
  std::optional<pycoll_error> start_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;  // the first one is removed after its start
  bool stop_ = false;
  std::thread thread_;
};

class DeviceMessageWork : public MessageWork {
 public:
  using MessageWork::MessageWork;

  /// Called before the start. `stream` makes the copies that remain when bytes have been received,
  /// after the work that is now queued on the current stream.
  void prepare(c10::Stream stream);

  /// Makes the current stream wait. The host waits for the bytes of a receive, and for a send only
  /// if there is a timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void complete(const pycoll_error* error) override;

 protected:
  void finish() override;

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> end_;
};

}  // namespace pycoll::torch_backend
