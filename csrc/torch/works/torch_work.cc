#include "torch/works/torch_work.h"

#include <exception>
#include <string>
#include <utility>

namespace pycoll::torch_backend {
namespace {

std::exception_ptr exception_of(const pycoll_error& error) {
  try {
    raise_core_error(error.code, error);
  } catch (...) {
    return std::current_exception();
  }
}

c10d::WorkResult result_of(const std::exception_ptr& error) {
  return error ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
}

}  // namespace

thread_local const Pending* Pending::told_ = nullptr;

void Pending::begin(Kind kind) {
  const std::lock_guard lock(mutex_);
  ++num_pending_[kind];
}

void Pending::end(Kind kind) {
  {
    const std::lock_guard lock(mutex_);
    --num_pending_[kind];
  }
  idle_.notify_all();
}

bool Pending::wait(Kind kind, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, timeout, [this, kind] { return num_pending_[kind] == 0; });
}

void Pending::wait(Kind kind) {
  wait_in_slices(kNoTimeout,
                 [this, kind](std::chrono::milliseconds slice) { return wait(kind, slice); });
}

PycollWork::PycollWork(int rank, Operation operation, uint64_t sequence, const char* title,
                       const std::optional<std::vector<at::Tensor>>& inputs)
    : Work(rank, operation.type, title, inputs),
      operation_(std::move(operation)),
      sequence_(sequence) {}

bool PycollWork::isCompleted() { return wait_for(std::chrono::milliseconds(0)); }

bool PycollWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

bool PycollWork::wait_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, timeout, [this] { return completed_; });
}

bool PycollWork::wait(std::chrono::milliseconds timeout) {
  const bool over =
      wait_in_slices(timeout, [this](std::chrono::milliseconds slice) { return wait_for(slice); });
  if (!over) {
    C10_THROW_ERROR(DistBackendError, std::string(operation_.title) + " is still going on after " +
                                          std::to_string(timeout.count()) + " ms of wait()");
  }
  const std::lock_guard lock(mutex_);
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

void PycollWork::abort() {
  TORCH_CHECK(false, operation_.title,
              ": one operation cannot be aborted; abort the process group");
}

float PycollWork::getDuration() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(completed_, "getDuration of an operation that is still going on");
  return std::chrono::duration<float, std::milli>(finished - started).count();
}

void PycollWork::complete(const pycoll_error* error) {
  std::exception_ptr exception;
  if (error != nullptr) {
    exception = exception_of(*error);
  } else {
    try {
      finish();
    } catch (...) {
      exception = std::current_exception();
    }
  }
  end(std::move(exception));
}

void PycollWork::settle(const pycoll_error* error) {
  end(error != nullptr ? exception_of(*error) : nullptr);
}

void PycollWork::end(std::exception_ptr exception) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<c10::ivalue::Future> result_future;
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;  // two threads that poll a device may both see the end
    finished = std::chrono::steady_clock::now();
    // First, since a profiler that stops at the end of this operation takes its events away.
    if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
    exception_ = std::move(exception);
    over_ = true;
    future = future_;
    result_future = result_future_;
  }
  const Pending::Telling telling(pending.get());
  if (on_completion) tell_hook();
  // The future is marked first, so that it is done when wait() of the work returns.
  if (future) mark(*future, true);
  if (result_future) mark(*result_future, false);
  {
    const std::lock_guard lock(mutex_);
    completed_ = true;
  }
  cv_.notify_all();
  if (pending != nullptr) pending->end(kind);
}

void PycollWork::tell_hook() {
  try {
    on_completion(*this);
  } catch (const std::exception& error) {  // no caller on the core's thread could catch it
    TORCH_WARN(operation_.title, ": the completion hook raised: ", error.what());
  }
}

void PycollWork::done(void* work, const pycoll_error* error) {
  c10::intrusive_ptr<PycollWork>::reclaim(static_cast<PycollWork*>(work))->complete(error);
}

void PycollWork::mark(c10::ivalue::Future& future, bool with_value) const {
  if (!with_value) {
    future.markCompleted(c10::IValue(static_cast<uint8_t>(result_of(exception_))));
  } else if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(operation_.outputs));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> PycollWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (!future_) {
    std::vector<c10::Device> devices;
    if (operation_.on_device()) devices.push_back(operation_.device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    if (over_) {
      lock.unlock();
      mark(*future_, true);
    }
  }
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> PycollWork::getFutureResult() {
  std::unique_lock lock(mutex_);
  if (!result_future_) {
    result_future_ = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    if (over_) {
      lock.unlock();
      mark(*result_future_, false);
    }
  }
  return result_future_;
}

}  // namespace pycoll::torch_backend
