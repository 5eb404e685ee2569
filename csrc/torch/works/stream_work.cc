#include "torch/works/stream_work.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <thread>

namespace pycoll::torch_backend {
namespace {

// Poll period of a waiting host: a kernel takes at least about 10 us.
constexpr std::chrono::microseconds kLookPeriod(50);

}  // namespace

void StreamWork::given(GivenWork work, c10::Stream stream, bool beside) {
  const c10::StreamGuard on_stream(stream);
  operation().finish();
  if (beside) {
    const c10::impl::VirtualGuardImpl guard = guard_of(stream.device());
    operation().for_each_tensor([&](const at::Tensor& tensor) {
      if (!tensor.device().is_cpu()) {
        guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
      }
    });
  }
  const std::lock_guard lock(mutex_);
  end_.emplace(stream.device_type());
  end_->record(stream);
  stream_ = stream;
  given_ = std::move(work);
  if (recordFunctionEndCallback_) {
    recordFunctionEndCallback_();
    recordFunctionEndCallback_ = nullptr;
  }
}

void StreamWork::check_given() const {
  TORCH_CHECK(stream_ || completed_, operation_.title,
              ": it has not begun: end its coalesced group before waiting for it");
}

bool StreamWork::poll() const {
  {
    const std::lock_guard lock(mutex_);
    if (completed_) return true;
    if (!stream_) return false;
    if (given_ == nullptr) return true;  // captured: there is nothing to wait for
  }
  pycoll_error error;
  const int code = core().poll_device_work(given_.get(), &error);
  if (code == PYCOLL_PENDING || (code == PYCOLL_OK && !end_->query())) return false;
  const_cast<StreamWork*>(this)->settle(code == PYCOLL_OK ? nullptr : &error);
  return true;
}

bool StreamWork::isSuccess() const { return poll() && !PycollWork::exception(); }

std::exception_ptr StreamWork::exception() const {
  poll();
  return PycollWork::exception();
}

bool StreamWork::wait_for(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!poll()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(kLookPeriod);
  }
  return true;
}

void StreamWork::synchronize() {
  check_given();
  if (stream_) {
    const c10::DeviceGuard on_device(stream_->device());
    end_->block(guard_of(stream_->device()).getStream(stream_->device()));
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout == kNoTimeout && opType_ != c10d::OpType::BARRIER) return true;
  return PycollWork::wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  check_given();
  if (!stream_) return PycollWork::getFuture();
  const std::lock_guard lock(mutex_);
  if (!stream_future_) {
    stream_future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_->device()});
    const c10::StreamGuard on_stream(*stream_);
    stream_future_->markCompleted(c10::IValue(operation_.outputs));
  }
  return stream_future_;
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFutureResult() {
  TORCH_CHECK(false, operation_.title,
              ": get_future_result supports CPU tensors only: use is_completed() and exception()");
}

}  // namespace pycoll::torch_backend
