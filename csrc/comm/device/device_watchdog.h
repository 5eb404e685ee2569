// Looks after the kernels of a rank while its threads do something else: what a device reports ends
// the communicator on all ranks, and what ends the communicator ends the kernels that still wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "executor/device/device_launch.h"
#include "transport/transport.h"

namespace pycoll {

class DeviceWatchdog {
 public:
  /// Both are in host memory that kernels reach; they outlive this object.
  DeviceWatchdog(Transport& transport, uint64_t* abort_word, DeviceReport* report);
  ~DeviceWatchdog();

  /// A launch of operation `sequence` was given to the device. One thread at a time.
  void launched(uint64_t sequence) { newest_.store(sequence); }
  /// What the thread does now and then, now: afterwards the failure word says what has gone wrong.
  void look();
  /// In a forked process: the thread does not exist here.
  void disown();

  /// What a kernel reported; its code is kNone when nothing.
  DeviceError error() const;
  /// The operation that it reported on.
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
  std::mutex look_mutex_;  // of what follows
  uint64_t compared_ = 0;  // operations whose calls agree on all ranks
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace pycoll
