// Watches the kernels of a rank on a thread of its own. An error that a device reports breaks the
// communicator on all ranks, and a broken communicator ends the kernels that still wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/thread.h"
#include "executor/device/device_launch.h"
#include "transport/transport.h"

namespace pycoll {

class DeviceWatchdog {
 public:
  /// `abort_word` and `report` are in CPU memory that kernels access, and outlive this object.
  DeviceWatchdog(Transport& transport, uint64_t* abort_word, DeviceReport* report);
  ~DeviceWatchdog();

  /// Notes that operation `sequence` was queued on the device. Called by one thread at a time.
  void launched(uint64_t sequence) { newest_.store(sequence); }
  /// Checks for errors, which the thread does periodically. A found error is in the failure word.
  void look();
  /// Detaches the thread, which does not exist in a forked process.
  void disown();

  /// The error that a kernel reported; its code is kNone if there is none.
  DeviceError error() const;
  /// The operation of the reported error.
  uint64_t failed_operation() const;

 private:
  static constexpr int kPeriodMs = 5;

  void run();
  void look_for_report();
  void look_for_mismatch();
  void look_for_ended_peers();

  Transport& transport_;
  Segment& segment_;
  const int rank_;
  uint64_t* const abort_word_;
  DeviceReport* const report_;
  std::atomic<uint64_t> newest_{0};
  std::mutex look_mutex_;  // guards compared_
  uint64_t compared_ = 0;  // operations whose calls agree on all ranks
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last, because it uses the others
};

}  // namespace pycoll
