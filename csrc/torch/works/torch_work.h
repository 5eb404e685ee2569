// torch's handle on an operation of ours.
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/bridge/operation.h"

namespace pycoll::torch_backend {

/// Waits until `wait_slice`, which waits as long as it is told, says that it is over. False when
/// `timeout` (0: none) has passed. Raises what a signal's handler raises.
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

/// How many operations of a backend are going on. Its works share it, and may outlive the backend.
class Pending {
 public:
  enum Kind { kCollective, kMessage };

  void begin(Kind kind);
  void end(Kind kind);
  /// Waits until none of that kind is going on; false when some are after `timeout`.
  bool wait(Kind kind, std::chrono::milliseconds timeout);
  /// The same without an end, but for a signal.
  void wait(Kind kind);

  /// While it exists, this thread is within the callbacks of an operation that still counts.
  class Telling {
   public:
    explicit Telling(const Pending* of) : before_(told_) { told_ = of; }
    ~Telling() { told_ = before_; }
    Telling(const Telling&) = delete;
    Telling& operator=(const Telling&) = delete;

   private:
    const Pending* before_;
  };
  /// Whether this thread is, which must not wait then.
  bool is_telling() const { return told_ == this; }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  int num_pending_[2] = {};
  static thread_local const Pending* told_;
};

class PycollWork : public c10d::Work {
 public:
  /// `title`: of the profiler's event; null when nobody profiles.
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

  /// The operation is over. Finishes it, and tells everyone. Once, on any thread.
  virtual void complete(const pycoll_error* error);
  /// For pycoll_done: takes over the reference that `work` stands for.
  static void done(void* work, const pycoll_error* error);
  /// A reference for done().
  static void* lend(const c10::intrusive_ptr<PycollWork>& work) {
    return c10::intrusive_ptr<PycollWork>(work).release();
  }

  /// Called in complete(), before anyone is told. What it raises becomes a warning.
  std::function<void(PycollWork&)> on_completion;
  std::shared_ptr<Pending> pending;  // null: not counted there
  Pending::Kind kind = Pending::kCollective;
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point finished;

 protected:
  /// Waits at most so long; false when it still goes on. The default waits for complete().
  virtual bool wait_for(std::chrono::milliseconds timeout);
  /// What complete() does of an operation that went well, before anyone is told.
  virtual void finish() { operation_.finish(); }
  /// complete() of an operation that has nothing left to do.
  void settle(const pycoll_error* error);

  Operation operation_;

 private:
  void end(std::exception_ptr exception);
  void tell_hook();
  void mark(c10::ivalue::Future& future, bool with_value) const;

  const uint64_t sequence_;
  bool over_ = false;  // futures made from now on are marked by who makes them
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10::ivalue::Future> result_future_;
};

}  // namespace pycoll::torch_backend
