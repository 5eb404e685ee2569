// Memory of every rank's device that the kernels of all ranks reach: the memory of the links, and
// registered arrays of the caller.
//
// Other processes reach an allocation by a descriptor or an IPC handle, the same process by its
// address. Before first use, a kernel of every rank stores a word in every other rank's memory, and
// another one waits for the words of the others. This detects a system that reports peer access
// that does not work. If any rank cannot reach another one, the window is made of CPU memory that
// all devices map.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "transport/memory/descriptors.h"
#include "transport/transport.h"

namespace pycoll {

class DeviceWindow {
 public:
  DeviceWindow(const DeviceWindow&) = delete;
  ~DeviceWindow();

  /// The memory of one rank; `keep_alive` owns it.
  struct Memory {
    void* data = nullptr;
    size_t nbytes = 0;
    std::shared_ptr<void> keep_alive;
  };

  /// Creates a window over device memory. Collective. Returns null on all ranks if some rank cannot
  /// reach another one's memory; `why` then names the rank and the reason, identically on all
  /// ranks. Raises the errors of `gather`, TimeoutError, PeerDiedError and SystemError.
  static std::unique_ptr<DeviceWindow> over(Transport& transport, const Device& device,
                                            const Memory& memory, const AllGather& gather,
                                            const Deadline& deadline, std::string& why);
  /// Creates a window over `nbytes` zeroed bytes of CPU memory per rank, which every device maps.
  static std::unique_ptr<DeviceWindow> of_cpu_memory(Transport& transport, const Device& device,
                                                     size_t nbytes, const AllGather& gather,
                                                     const Deadline& deadline);
  /// Stores a word for each rank at the start of every rank's memory, waits for the words of the
  /// other ranks, and clears them, all by kernels. Collective. Returns an empty text, or describes
  /// what is missing.
  std::string test(Transport& transport, const AllGather& gather) const;

  /// Address at which this rank's kernels reach the memory of `rank`.
  std::byte* at(int rank) const { return bases_[static_cast<size_t>(rank)]; }
  /// Address at which this process reaches the CPU memory of `rank`; only of of_cpu_memory().
  std::byte* cpu_at(int rank) const { return cpu_bases_[static_cast<size_t>(rank)]; }
  size_t nbytes_of(int rank) const { return nbytes_[static_cast<size_t>(rank)]; }
  bool is_on_host() const { return on_host_; }

 private:
  DeviceWindow(const Device& device, int num_ranks);

  Device device_;
  bool on_host_ = false;
  std::vector<std::byte*> bases_;      // by rank
  std::vector<std::byte*> cpu_bases_;  // by rank; empty: of device memory
  std::vector<size_t> nbytes_;
  std::vector<void*> imports_;               // to release at the end
  std::vector<std::shared_ptr<void>> kept_;  // memory of this process
};

}  // namespace pycoll
