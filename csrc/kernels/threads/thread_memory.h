// Memory of the emulated device: one memfd for each allocation, so that other processes can map it.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "base/fd.h"
#include "device/device_table.h"

namespace pycoll {

class ThreadMemory {
 public:
  void* allocate(int device, size_t nbytes);
  void free(void* memory);
  /// The device of `p`, or -1 when it is not memory of a device.
  int device_of(const void* p);
  /// Exports the allocation of `p`. The caller owns `fd`.
  void export_memory(const void* p, DeviceHandle* handle, int32_t* fd);
  void* import_memory(int device, const DeviceHandle& handle, int fd);
  /// False for memory that is not of a device.
  bool withdraw(const void* p);

 private:
  struct Allocation {
    int device;
    size_t nbytes;
    Fd fd;
  };
  using Allocations = std::map<const std::byte*, Allocation>;

  void* map(int device, size_t nbytes, Fd fd);
  Allocations::iterator find(const void* p);

  std::mutex mutex_;
  Allocations allocations_;  // by address
};

}  // namespace pycoll
