// Arrays of a rank's device that the kernels of all ranks can access: from comm.empty(device=...),
// and registered ones. All ranks register in the same order, so a number identifies the same
// registration on all ranks.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/device_slab.h"
#include "transport/memory/device_window.h"
#include "transport/ring/slot.h"

namespace pycoll {

class DeviceArrays {
 public:
  DeviceArrays(const Device& device, int num_ranks, DeviceSlab& slab)
      : device_(device), num_ranks_(num_ranks), slab_(slab) {}

  /// Adds the array [data, data + nbytes) with its window. All ranks add arrays in the same order.
  void add(std::byte* data, size_t nbytes, std::unique_ptr<DeviceWindow> window,
           std::shared_ptr<void> keep_alive);
  /// Removes the array that starts at `data` and is no longer used by a kernel. False if there is
  /// none.
  bool remove(const std::byte* data);

  /// Places of a call's buffers, for its launch.
  struct Places {
    uint64_t* input_used = nullptr;  // Array::last_used
    uint64_t* output_used = nullptr;
    std::byte* const* peer_inputs = nullptr;  // DeviceLaunch::peer_inputs
    std::byte* const* peer_outputs = nullptr;
    const DeviceWindow* input_window = nullptr;  // the same addresses, for the CPU
    const DeviceWindow* output_window = nullptr;
    int64_t input_offset = 0;
    int64_t output_offset = 0;
    uint32_t hash = 0;  // equal on ranks with equal places
  };
  /// Finds the places of a call's buffers; nullopt unless both are in registered arrays.
  std::optional<Places> find(const void* input, size_t input_bytes, const void* output,
                             size_t output_bytes);
  /// Notes that an array was not added, because the ranks do not reach it.
  void note_unreached(const std::string& why) {
    ++num_unreached_;
    why_unreached_ = why;
  }
  /// A sentence on arrays that the ranks do not reach, for explain(); empty if there are none.
  std::string describe_unreached() const;
  /// Records that an operation uses the arrays of `places`.
  static void use(const Places& places, uint64_t operation) {
    store_relaxed(*places.input_used, operation);
    store_relaxed(*places.output_used, operation);
  }
  /// Takes the arrays that `operation` or a later one used back from the other ranks: they become
  /// private memory, with their content and at their addresses. Waits for the device. May be called
  /// by any thread. Arrays of other libraries stay where they are. Raises CudaError.
  void withdraw(uint64_t operation);

 private:
  struct Array {
    uint64_t number;
    uint64_t last_used;  // atomic: operation
    size_t nbytes;
    std::unique_ptr<DeviceWindow> window;
    std::shared_ptr<void> keep_alive;
    std::byte* const* at_peers;  // where this rank reaches the arrays of all ranks; in the slab
  };
  using Arrays = std::map<const std::byte*, Array>;

  Arrays::iterator around(const void* data, size_t nbytes);

  Device device_;
  int num_ranks_;
  // Its tables are not freed before the end, because a captured graph may use one after its array
  // is removed.
  DeviceSlab& slab_;
  uint64_t last_number_ = 0;
  int num_unreached_ = 0;
  std::string why_unreached_;  // the last one
  Arrays arrays_;              // by address
  std::mutex mutex_;           // for changes of arrays_, and withdraw()
};

}  // namespace pycoll
