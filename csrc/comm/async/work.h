// A handle on an operation that runs on the progress thread.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>

namespace pycoll {

class Work {
 public:
  /// True when the operation is over, successfully or not.
  bool done() const;
  /// Waits at most `timeout_s` for the operation; true when it is over.
  bool ended(double timeout_s) const;
  /// Waits at most `timeout_s`; false if the operation is not over by then. Rethrows the
  /// operation's error.
  bool wait(double timeout_s) const;
  /// The operation's error once it is over, else null.
  std::exception_ptr error() const;

  /// Marks the operation as over. Called by the progress thread.
  void finish(std::exception_ptr error);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable over_;
  bool done_ = false;
  std::exception_ptr error_;
};

}  // namespace pycoll
