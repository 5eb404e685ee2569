// torch's handle on an operation of pycoll.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Calls `wait_slice` with short timeouts until it returns true. False when `timeout` (0: none) has
/// passed. Raises the error of a signal handler.
template <class WaitSlice>
bool wait_in_slices(std::chrono::milliseconds timeout, WaitSlice&& wait_slice) {
  constexpr std::chrono::milliseconds kSlice(50);
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    auto slice = kSlice;
    if (timeout.count() > 0) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      if (left.count() <= 0) return wait_slice(std::chrono::milliseconds(0));
      slice = std::min(slice, left);
    }
    if (wait_slice(slice)) return true;
    raise_signals();
  }
}

/// Number of running operations of a backend. The works share it and may outlive the backend.
class Pending {
 public:
  enum Kind { kCollective, kMessage };

  void begin(Kind kind);
  void end(Kind kind);
  /// Waits until no operation of that kind is running; false when `timeout` has passed.
  bool wait(Kind kind, std::chrono::milliseconds timeout);
  /// Waits without a timeout; a signal ends the wait.
  void wait(Kind kind);

  /// Scope in which this thread runs the callbacks of an operation that is still counted.
  class Telling {
   public:
    explicit Telling(const Pending* of) : before_(told_) { told_ = of; }
    ~Telling() { told_ = before_; }
    Telling(const Telling&) = delete;
    Telling& operator=(const Telling&) = delete;

   private:
    const Pending* before_;
  };
  /// Whether this thread is in such a scope; it must not wait then.
  bool is_telling() const { return told_ == this; }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int num_pending_[2] = {};
  static thread_local const Pending* told_;
};

class PycollWork : public c10d::Work {
 public:
  /// `title`: title of the profiler's event; null when no profiler is active.
  PycollWork(int rank, Operation operation, uint64_t sequence, const char* title,
             const std::optional<std::vector<at::Tensor>>& inputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return operation_.outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override;

  Operation& operation() { return operation_; }

  /// Finishes the ended operation and notifies waiters, futures and callbacks. Called once, on any
  /// thread.
  virtual void complete(const pycoll_error* error);
  /// Callback for pycoll_done: takes ownership of the reference in `work`.
  static void done(void* work, const pycoll_error* error);
  /// A reference for done().
  static void* lend(const c10::intrusive_ptr<PycollWork>& work) {
    return c10::intrusive_ptr<PycollWork>(work).release();
  }

  /// Called in complete(), before the notifications. An exception becomes a warning.
  std::function<void(PycollWork&)> on_completion;
  std::shared_ptr<Pending> pending;  // null: not counted
  Pending::Kind kind = Pending::kCollective;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point finished;

 protected:
  /// Waits at most `timeout`; false when the operation is still running. The default waits for
  /// complete().
  virtual bool wait_for(std::chrono::milliseconds timeout);
  /// Called by complete() after success, before the notifications.
  virtual void finish() { operation_.finish(); }
  /// The part of complete() that marks the operation as over and notifies.
  void settle(const pycoll_error* error);

  Operation operation_;

 private:
  void end(std::exception_ptr exception);
  void tell_hook();
  void mark(c10::ivalue::Future& future, bool with_value) const;

  const uint64_t sequence_;
  bool over_ = false;  // a future made after this is marked by its maker
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_future_;
};

}  // namespace pycoll::torch_backend
