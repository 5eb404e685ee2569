// torch's handle on an operation that was given to a device: waiting for it is for streams.
#pragma once

#include <c10/core/Event.h>

#include "torch/works/torch_work.h"

namespace pycoll::torch_backend {

/// What the core knows of operations that a device was given together. Null: the stream is
/// captured, and nothing runs yet.
using GivenWork = std::shared_ptr<pycoll_device_work>;

/// A guard of the streams and events of a device's kind, whatever kind that is.
inline c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

class StreamWork : public PycollWork {
 public:
  using PycollWork::PycollWork;

  bool isCompleted() override { return poll(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// The current stream waits; the host does so only for a barrier, or where there is a timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  /// Done for the host at once; its values are ready on the streams of whoever asks for them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

  /// The device has the operation, on `stream`. Finishes it there. `beside`: that is not the
  /// caller's, so whoever frees a tensor must wait for it.
  void given(GivenWork work, c10::Stream stream, bool beside);
  /// The device did not take it.
  void refused(const pycoll_error& error) { complete(&error); }

 protected:
  bool wait_for(std::chrono::milliseconds timeout) override;

 private:
  bool poll() const;
  void check_given() const;

  GivenWork given_;
  std::optional<c10::Stream> stream_;  // that it runs on, once it was given
  std::optional<c10::Event> end_;
  c10::intrusive_ptr<c10::ivalue::Future> stream_future_;
};

}  // namespace pycoll::torch_backend
