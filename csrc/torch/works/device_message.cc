#include "torch/works/device_message.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <system_error>

namespace pycoll::torch_backend {

MessageStarter::~MessageStarter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MessageStarter::start(std::optional<c10::Event> after, Start start) {
  std::optional<pycoll_error> error;
  {
    const std::lock_guard lock(mutex_);
    if (after || !waiting_.empty()) {
      error = start_thread();
      if (!error) {
        waiting_.push_back({std::move(after), std::move(start)});
        changed_.notify_all();
        return;
      }
    }
  }
  start(error ? &*error : nullptr);
}

std::optional<pycoll_error> MessageStarter::start_thread() {
  if (thread_.joinable()) return std::nullopt;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return make_error(
        PYCOLL_SYSTEM_ERROR,
        "the thread that starts messages of devices did not start: " + error.code().message());
  }
  return std::nullopt;
}

void MessageStarter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Waiting& first = waiting_.front();
    lock.unlock();
    std::optional<pycoll_error> error;
    try {
      if (first.after) first.after->synchronize();
    } catch (const std::exception& raised) {
      error = make_error(PYCOLL_SYSTEM_ERROR, raised.what());
    }
    first.start(error ? &*error : nullptr);
    lock.lock();
    waiting_.pop_front();
  }
}

void DeviceMessageWork::prepare(c10::Stream stream) {
  const c10::impl::VirtualGuardImpl guard = guard_of(stream.device());
  c10::Event ready(stream.device_type());
  ready.record(guard.getStream(stream.device()));
  ready.block(stream);
  operation_.for_each_tensor([&](const at::Tensor& tensor) {
    if (!tensor.device().is_cpu()) {
      guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  });
  stream_ = stream;
}

void DeviceMessageWork::finish() {
  operation_.finish();
  end_.emplace(stream_->device_type());
  end_->record(*stream_);
}

void DeviceMessageWork::complete(const pycoll_error* error) {
  const c10::StreamGuard on_stream(*stream_);
  PycollWork::complete(error);
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceMessageWork::getFuture() {
  const c10::StreamGuard on_stream(*stream_);
  return PycollWork::getFuture();
}

bool DeviceMessageWork::wait(std::chrono::milliseconds timeout) {
  // The bytes of a send are copied in stream order, so the current stream can go on.
  const bool is_send = opType_ == c10d::OpType::SEND;
  if (!is_send || timeout != kNoTimeout || isCompleted()) PycollWork::wait(timeout);
  if (!is_send) {
    const c10::DeviceGuard on_device(stream_->device());
    end_->block(guard_of(stream_->device()).getStream(stream_->device()));
  }
  return true;
}

}  // namespace pycoll::torch_backend
