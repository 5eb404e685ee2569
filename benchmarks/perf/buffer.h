// Memory of a message: of the host, or of a device with a copy on the host that is filled and
// checked.
#pragma once

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"
#include "perf/options.h"

namespace pycoll::perf {

class Buffer {
 public:
  /// Collective where it is registered.
  Buffer(Communicator& comm, const Options& options, size_t nbytes, bool registered);

  /// The argument of a call.
  std::byte* data() const { return data_; }
  /// The bytes for the host; those of a device's memory are as of the last pull().
  std::byte* host() const { return host_; }
  /// Makes data() what host() is.
  void push() const;
  void pull() const;

 private:
  std::shared_ptr<std::byte> memory_;
  std::shared_ptr<const DeviceMemory> on_device_;
  size_t nbytes_;
  std::byte* data_;
  std::byte* host_;
};

/// The device of a rank's arrays: they are dealt in turn. -1: the host.
int device_of(const Options& options, int rank);

}  // namespace pycoll::perf
