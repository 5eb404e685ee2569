// Memory of the emulated device: one memfd for each allocation, so that other processes can map it.
// Its size is a multiple of 2 MiB, as that of a GPU's virtual memory.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

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
  /// False for memory that is not of a device, or not exported by a descriptor.
  bool withdraw(const void* p);
  /// DeviceFacts::memory_note.
  std::string note();

 private:
  struct Allocation {
    int device;
    size_t nbytes;
    Fd fd;
    bool by_descriptor;  // or by DeviceHandleKind::kIpc
  };
  using Allocations = std::map<const std::byte*, Allocation>;

  void* map(int device, size_t nbytes, Fd fd, bool by_descriptor);
  Allocations::iterator find(const void* p);

  std::mutex mutex_;
  Allocations allocations_;  // by address
  std::string refused_;      // why no memory is exported by a descriptor; empty: it is
};

/// The error with which `function` fails, by PYCOLL_DEVICE_THREADS_FAIL; empty: it works.
std::string told_failure(const std::string& function);

}  // namespace pycoll
