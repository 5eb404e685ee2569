// A handle on an operation that a device runs beside its caller's stream.
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
  /// `ended_by`: what ended operation `sequence`, which is over, null for nothing. `keep_alive` is
  /// let go when that is known.
  DeviceWork(const Device& device, uint64_t sequence, std::shared_ptr<void> keep_alive,
             std::function<std::exception_ptr(uint64_t sequence)> ended_by);

  /// Where the operation ends.
  StreamEvent& over() { return over_; }
  /// Of an operation that the device gets from another thread: `giving` is over once over() is
  /// recorded. Before anybody else has this object.
  void follow(std::shared_ptr<Work> giving) { giving_ = std::move(giving); }

  /// True when it is over, well or not.
  bool done();
  /// Whether the device has all of it, after at most `timeout_s`.
  bool given(double timeout_s) const;
  /// What `stream` gets from now on begins after it; it is given. Raises what ended the operation
  /// if that is known already.
  void hold(DeviceStream stream);
  /// Waits at most `timeout_s`. False when it still runs then. Rethrows the operation's error.
  bool wait(double timeout_s);
  /// The operation's error once it is over, else null.
  std::exception_ptr error();
  /// The communicator is about to go: asks it for the last time.
  void settle();

 private:
  StreamEvent over_;
  const uint64_t sequence_;
  std::mutex mutex_;
  std::shared_ptr<void> keep_alive_;
  std::function<std::exception_ptr(uint64_t)> ended_by_;  // null: it is settled
  std::exception_ptr error_;
  std::shared_ptr<const Work> giving_;  // null: it was given at once
};

}  // namespace pycoll
