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
  /// -1: no memory of a device.
  int device_of(const void* p);
  /// `fd` is the caller's.
  void export_memory(const void* p, DeviceHandle* handle, int32_t* fd);
  void* import_memory(int device, const DeviceHandle& handle, int fd);

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
