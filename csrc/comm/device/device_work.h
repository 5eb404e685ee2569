// A handle on an operation that a device runs on a stream beside the caller's.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/async/work.h"
#include "device/device.h"

namespace pycoll {

class DeviceWork {
 public:
  /// `ended_by` returns the error of the finished operation `sequence`; null: none. `keep_alive` is
  /// released afterwards.
  DeviceWork(const Device& device, uint64_t sequence, std::shared_ptr<void> keep_alive,
             std::function<std::exception_ptr(uint64_t sequence)> ended_by);

  /// The event at the end of the operation.
  StreamEvent& over() { return over_; }
  /// Sets the work that queues the operation on another thread; it is over once over() is recorded.
  /// Called before any other thread has this object.
  void follow(std::shared_ptr<Work> giving) { giving_ = std::move(giving); }

  /// True when the operation is over, successfully or not.
  bool done();
  /// Waits at most `timeout_s` until the operation is completely queued; true if it is.
  bool given(double timeout_s) const;
  /// Makes later work on `stream` wait for the operation, for which given() is true. Raises the
  /// operation's error if it is already known.
  void hold(DeviceStream stream);
  /// Waits at most `timeout_s`; false if the operation is not over by then. Rethrows its error.
  bool wait(double timeout_s);
  /// The operation's error once it is over, else null.
  std::exception_ptr error();
  /// Stores the operation's error and releases `keep_alive`. Called when the operation is over, and
  /// before the communicator is destroyed.
  void settle();

 private:
  StreamEvent over_;
  const uint64_t sequence_;
  std::mutex mutex_;
  std::shared_ptr<void> keep_alive_;
  std::function<std::exception_ptr(uint64_t)> ended_by_;  // null: already called
  std::exception_ptr error_;
  std::shared_ptr<const Work> giving_;  // null: queued by the constructor's thread
};

}  // namespace pycoll
