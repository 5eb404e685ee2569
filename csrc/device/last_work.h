// The end of the work that each communicator has queued on a device, and memory that is freed
// behind it. Freeing memory waits for the whole device, and a kernel on it may wait for another
// rank: so dropped memory is kept until no operation is under way.
#pragma once

#include <mutex>

#include "device/device.h"

namespace pycoll {

/// The last operation that one communicator has queued. All functions may be called by any thread.
class LastWork {
 public:
  explicit LastWork(const Device& device);
  ~LastWork();
  LastWork(const LastWork&) = delete;

  /// Makes `stream` wait for the last operation if that is on another stream.
  void order(DeviceStream stream);
  /// Notes that an operation was queued on `stream`.
  void queued(DeviceStream stream);
  /// True when the last operation is over, or the device is lost.
  bool is_over();
  /// Waits for the last operation. Raises CudaError.
  void synchronize();

  const Device& device() const { return device_; }

 private:
  /// Records the event behind the last operation, if it is not there.
  void mark();

  const Device device_;
  std::mutex mutex_;
  StreamEvent event_;
  DeviceStream stream_ = nullptr;
  bool any_ = false;        // an operation was queued
  bool is_marked_ = false;  // the event is recorded behind it
};

/// Frees `memory` once no operation is under way on the device, or later: with the next memory that
/// is dropped or allocated, or when a communicator is closed.
void free_later(const Device& device, void* memory);
/// Frees what free_later() has kept, if no operation is under way on the device.
void free_dropped(const Device& device);

}  // namespace pycoll
