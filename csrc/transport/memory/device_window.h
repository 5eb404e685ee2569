// Memory of every rank's device that the kernels of all ranks reach: the links' memory, and arrays
// of the caller that are registered.
//
// Between processes an allocation is reached by a descriptor or an IPC handle, within one by its
// address. Before it is used every rank writes a word into every other rank's memory and looks for
// those of the others, so that a system that promises peer access and does not give it is found out
// here. Where some rank does not reach some other one, the same window is made of host memory that
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

  /// Of one rank; `keep_alive` holds it.
  struct Memory {
    void* data = nullptr;
    size_t nbytes = 0;
    std::shared_ptr<void> keep_alive;
  };

  /// All ranks call this alike. Nothing when some rank cannot reach another one's memory; `why`
  /// then says which and why, on all ranks alike. Raises as `gather` does, TimeoutError,
  /// PeerDiedError, SystemError.
  static std::unique_ptr<DeviceWindow> over(Transport& transport, const Device& device,
                                            const Memory& memory, const AllGather& gather,
                                            const Deadline& deadline, std::string& why);
  /// The same of `nbytes` zeroed bytes of host memory for each rank, which every device maps.
  static std::unique_ptr<DeviceWindow> of_host(Transport& transport, const Device& device,
                                               size_t nbytes, const AllGather& gather,
                                               const Deadline& deadline);
  /// Writes a word for each rank to the start of every rank's memory, looks for those that the
  /// others wrote, and clears them. Collective. Empty when all arrived, else what did not.
  std::string test(Transport& transport, const AllGather& gather) const;

  /// Where this rank's kernels reach the memory of `rank`.
  std::byte* at(int rank) const { return bases_[static_cast<size_t>(rank)]; }
  size_t nbytes_of(int rank) const { return nbytes_[static_cast<size_t>(rank)]; }
  bool is_on_host() const { return on_host_; }

 private:
  DeviceWindow(const Device& device, int num_ranks);

  Device device_;
  bool on_host_ = false;
  std::vector<std::byte*> bases_;  // by rank
  std::vector<size_t> nbytes_;
  std::vector<void*> imports_;               // to be released
  std::vector<std::shared_ptr<void>> kept_;  // memory of this process
};

}  // namespace pycoll
