// Watches the kernels of a rank on a thread of its own. An error that a device reports breaks the
// communicator on all ranks, and a broken communicator ends the kernels that still wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/thread.h"
#include "comm/device/device_pause.h"
#include "comm/device/streams/stream_waits.h"
#include "executor/device/device_launch.h"
#include "transport/transport.h"

namespace pycoll {

class DeviceWatchdog {
 public:
  /// `abort_word` and `report` are in CPU memory that kernels access. `waits`: of the rank's
  /// streams; null: they have none. All outlive this object.
  DeviceWatchdog(Transport& transport, uint64_t* abort_word, DeviceReport* report,
                 StreamWaits* waits);
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
  static constexpr auto kPeriod = std::chrono::microseconds(5000);
  // While waits of queued operations end one after another, the thread pauses for shorter times.
  static constexpr int64_t kShortPausesNs = 1'000'000'000;

  void run();
  bool ends_waits() const;
  void look_at_waits();
  void end_waits();
  void report(const DeviceError& error);
  /// Number of the first operation that waited in streams and is not known to be good.
  uint64_t first_doubtful() const;
  void look_for_report();
  void look_for_mismatch();
  void look_for_ended_peers();

  Transport& transport_;
  Segment& segment_;
  const int rank_;
  uint64_t* const abort_word_;
  DeviceReport* const report_;
  StreamWaits* const waits_;
  std::atomic<int64_t> broken_ns_{0};  // when the communicator was first seen to be broken
  std::atomic<uint64_t> newest_{0};
  std::mutex look_mutex_;  // guards the next four
  uint64_t good_ = 0;      // the last operation that ended in waits_ before any failure
  uint64_t compared_ = 0;  // operations whose calls agree on all ranks
  DevicePause pause_;      // since an operation of a broken communicator ended last
  uint64_t over_at_pause_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last, because it uses the others
};

}  // namespace pycoll
