// A device array that is sent or received through CPU memory, where messages of devices are not
// possible (p2p/device_messages.h). The copies run in the order of the array's stream, and the
// caller waits for them.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "bindings/arguments/array.h"
#include "device/device.h"
#include "device/device_library.h"

namespace pycoll {

/// Raises UsageError if the array's stream is being captured.
inline void refuse_captured(const Device& device, const ArrayView& x, const char* function) {
  if (device.capture_of(x.stream) == 0) return;
  throw UsageError(std::string(function) +
                   " of a device array cannot be captured: the host matches messages");
}

class StagedArray {
 public:
  StagedArray(const ArrayView& x, const char* function)
      : device_(device_table(), x.device),
        stream_(x.stream),
        on_device_(x.data),
        bytes_(static_cast<size_t>(x.nbytes())) {
    refuse_captured(device_, x, function);
  }
  std::byte* data() { return bytes_.data(); }

  void fetch() { copy(bytes_.data(), on_device_); }
  void deliver() const { copy(on_device_, bytes_.data()); }

 private:
  void copy(void* to, const void* from) const {
    if (bytes_.empty()) return;
    device_.copy(to, from, bytes_.size(), stream_);
    device_.synchronize(stream_);
  }

  Device device_;
  DeviceStream stream_;
  void* on_device_;
  std::vector<std::byte> bytes_;
};

}  // namespace pycoll
