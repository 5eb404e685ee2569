// torch's handle on a send or receive: a thread that waits for it makes progress on messages.
#pragma once

#include <atomic>
#include <memory>

#include "torch/works/torch_work.h"

namespace pycoll::torch_backend {

/// How the core reaches the bytes of a message: in CPU memory, or in memory of a device.
struct MessageRoute {
  int device = -1;                             // -1: the CPU
  std::shared_ptr<pycoll_device_bytes> bytes;  // of a send from a device
};

class MessageWork : public PycollWork {
 public:
  using PycollWork::PycollWork;
  ~MessageWork() override {
    if (handle_ != nullptr) core().release_message(handle_);
  }

  /// Called once, on any thread. A thread that waits earlier is notified on completion but makes no
  /// progress itself.
  void start(pycoll_comm* comm, const pycoll_message& message, const MessageRoute& route) {
    pycoll_error error;
    void* const lent = lend(c10::intrusive_ptr<PycollWork>::reclaim_copy(this));
    const int code =
        route.device < 0
            ? core().start_message(comm, &message, done, lent, &handle_, &error)
            : core().start_device_message(comm, &message, route.device, route.bytes.get(), done,
                                          lent, &handle_, &error);
    if (code == PYCOLL_OK) {
      started_ = true;
    } else {
      done(lent, &error);
    }
  }

  int sourceRank() const override {
    return isSuccess() ? core().message_source(handle_) : PYCOLL_ANY_SOURCE;
  }

 protected:
  bool wait_for(std::chrono::milliseconds timeout) override {
    if (!started_) return PycollWork::wait_for(timeout);
    pycoll_error error;
    const double timeout_s = std::chrono::duration<double>(timeout).count();
    if (core().wait_message(handle_, timeout_s, &error) == PYCOLL_PENDING) return false;
    // The thread that saw the end may still be sending the notifications.
    return PycollWork::wait_for(std::chrono::hours(1));
  }

 private:
  pycoll_handle* handle_ = nullptr;  // other threads read it after the start or the end
  std::atomic<bool> started_ = false;
};

}  // namespace pycoll::torch_backend
