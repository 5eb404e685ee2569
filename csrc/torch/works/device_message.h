// torch's handle on a send or receive of a device's tensor. The bytes travel through memory of the
// host, as messages of the CPU's tensors do; streams and threads wait for each other, not the
// caller.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>

#include "torch/works/message_work.h"
#include "torch/works/stream_work.h"

namespace pycoll::torch_backend {

/// Starts messages once an event has come, in the order in which they were given to it. A forked
/// process, which has no such thread, does not destroy it.
class MessageStarter {
 public:
  ~MessageStarter();

  /// Calls `start` on the starter's thread behind `after`, or here and now where there is none and
  /// nothing waits.
  void start(std::optional<c10::Event> after, std::function<void()> start);

 private:
  struct Waiting {
    std::optional<c10::Event> after;
    std::function<void()> start;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;  // the first one stays while it is started
  bool stop_ = false;
  std::thread thread_;
};

class DeviceMessageWork : public MessageWork {
 public:
  using MessageWork::MessageWork;

  /// `stream`: on which what was received is copied to its tensor, behind what the current one has
  /// got. Before it is started.
  void prepare(c10::Stream stream);

  /// The current stream waits. The host does so for a receive, until the bytes have come; and for a
  /// send only where there is a timeout.
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
