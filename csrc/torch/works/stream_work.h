// torch's handle on an operation that runs on a device: streams wait for it, not the host.
#pragma once

#include <c10/core/Event.h>

#include "torch/works/torch_work.h"

namespace pycoll::torch_backend {

/// The core's handle on operations that were launched together. Null: the stream is being captured,
/// and nothing runs yet.
using GivenWork = std::shared_ptr<pycoll_device_work>;

/// A guard for the streams and events of any type of device.
inline c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

class StreamWork : public PycollWork {
 public:
  using PycollWork::PycollWork;

  bool isCompleted() override { return poll(); }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  /// Makes the current stream wait; the host waits only for a barrier, or if there is a timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  /// A future that is done for the host at once; a stream that uses its values waits for them.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

  /// Called once the operation is queued on `stream`; finishes it there. `beside`: `stream` is not
  /// the caller's, so the memory of a freed tensor must not be reused before the operation ends.
  void given(GivenWork work, c10::Stream stream, bool beside);
  /// Called when the launch failed.
  void refused(const pycoll_error& error) { complete(&error); }

 protected:
  bool wait_for(std::chrono::milliseconds timeout) override;

 private:
  bool poll() const;
  void check_given() const;

  GivenWork given_;
  std::optional<c10::Stream> stream_;  // set at launch
  std::optional<c10::Event> end_;
  c10::intrusive_ptr<c10::ivalue::Future> stream_future_;
};

}  // namespace pycoll::torch_backend
