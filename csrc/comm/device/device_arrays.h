// Arrays of a rank's device that the kernels of all ranks reach: those of comm.empty(device=...)
// and those that were registered. All ranks register alike, so the same number means the same
// registration on all of them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "executor/device/device_launch.h"
#include "transport/memory/device_window.h"

namespace pycoll {

class DeviceArrays {
 public:
  DeviceArrays(const Device& device, int num_ranks) : device_(device), num_ranks_(num_ranks) {}

  /// Takes a window over this rank's [data, data + nbytes). On all ranks alike.
  void add(std::byte* data, size_t nbytes, std::unique_ptr<DeviceWindow> window,
           std::shared_ptr<void> keep_alive);
  /// Of the array that starts there. False when there is none. No kernel uses it any more.
  bool remove(const std::byte* data);

  /// Where a call's buffers lie, as a launch says it.
  struct Places {
    const DevicePeerBuffers* peer_buffers = nullptr;
    int64_t input_offset = 0;
    int64_t output_offset = 0;
    uint32_t hash = 0;  // alike on ranks whose places are
  };
  /// Nothing unless both lie in such arrays.
  std::optional<Places> find(const void* input, size_t input_bytes, const void* output,
                             size_t output_bytes);
  bool empty() const { return arrays_.empty(); }

 private:
  struct Array {
    uint64_t number;
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
  Arrays arrays_;  // by address
  // Peers' buffers by the numbers of the input's and the output's array; captured graphs may use
  // one after its array is gone, so none is freed before the end.
  std::map<std::pair<uint64_t, uint64_t>, DeviceMemory> tables_;
};

}  // namespace pycoll
