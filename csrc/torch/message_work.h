// torch's handle on a send or receive: who waits for it moves messages on.
#pragma once

#include "torch/work.h"

namespace pycoll::torch_backend {

class MessageWork : public PycollWork {
 public:
  using PycollWork::PycollWork;
  ~MessageWork() override {
    if (handle != nullptr) core().release_message(handle);
  }

  int sourceRank() const override {
    return handle == nullptr ? PYCOLL_ANY_SOURCE : core().message_source(handle);
  }

  pycoll_handle* handle = nullptr;  // once it was started

 protected:
  bool wait_for(std::chrono::milliseconds timeout) override {
    pycoll_error error;
    const double timeout_s = std::chrono::duration<double>(timeout).count();
    if (core().wait_message(handle, timeout_s, &error) == PYCOLL_PENDING) return false;
    // The thread that saw its end may still be telling everyone.
    return PycollWork::wait_for(std::chrono::hours(1));
  }
};

}  // namespace pycoll::torch_backend
