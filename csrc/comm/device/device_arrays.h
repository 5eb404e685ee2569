// Arrays of a rank's device that the kernels of all ranks can access: from comm.empty(device=...),
// and registered ones. All ranks register in the same order, so a number identifies the same
// registration on all ranks.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "executor/device/device_launch.h"
#include "transport/memory/device_window.h"
#include "transport/ring/slot.h"

namespace pycoll {

class DeviceArrays {
 public:
  DeviceArrays(const Device& device, int num_ranks) : device_(device), num_ranks_(num_ranks) {}

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
    const DevicePeerBuffers* peer_buffers = nullptr;
    int64_t input_offset = 0;
    int64_t output_offset = 0;
    uint32_t hash = 0;  // equal on ranks with equal places
  };
  /// Finds the places of a call's buffers; nullopt unless both are in registered arrays.
  std::optional<Places> find(const void* input, size_t input_bytes, const void* output,
                             size_t output_bytes);
  bool empty() const { return arrays_.empty(); }
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
  };
  using Arrays = std::map<const std::byte*, Array>;

  Arrays::iterator around(const void* data, size_t nbytes);
  void make_table(const Array& input, const Array& output);

  Device device_;
  int num_ranks_;
  uint64_t last_number_ = 0;
  Arrays arrays_;     // by address
  std::mutex mutex_;  // for changes of arrays_, and withdraw()
  // Peers' buffers, by the numbers of the input's and the output's array. Not freed before the end,
  // because a captured graph may use a table after its array is removed.
  std::map<std::pair<uint64_t, uint64_t>, DeviceMemory> tables_;
};

}  // namespace pycoll
