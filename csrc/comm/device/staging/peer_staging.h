// Copies of a call's arrays in memory that all ranks access. Plain arrays need them where streams
// wait for peers (stream_waits.h), because kernels use no slots there.
#pragma once

#include <memory>

#include "comm/device/device_arrays.h"
#include "comm/device/staging/call_parts.h"

namespace pycoll {

class PeerStaging {
 public:
  /// Makes the memory; pinned CPU memory if the ranks do not reach each other's device memory.
  /// Collective.
  PeerStaging(Transport& transport, const Device& device, bool on_host, DeviceSlab& slab,
              const AllGather& gather, const Deadline& deadline);

  /// Whether the call's arrays can be copied. Identical on all ranks.
  static bool can(const Call& call);
  /// Places of the memory for inputs and for outputs.
  const DeviceArrays::Places& places() const { return places_; }

  /// The part of `call` that begins at this element of its blocks.
  CallPart part(const Call& call, int64_t begin) const;
  /// The call on the copies of a part.
  Call call_on_copies(const Call& call, CallPart part) const;
  /// Queues the copy of the part's input here, and of its output back, on the call's stream.
  void fetch(const Call& call, CallPart part) const;
  void deliver(const Call& call, CallPart part) const;

 private:
  static constexpr int64_t kBytes = int64_t{8} << 20;  // for inputs, and for outputs

  const Device device_;
  const int rank_;
  const int num_ranks_;
  DeviceArrays arrays_;  // this memory only: late ranks may write it, so it is never withdrawn
  std::byte* inputs_ = nullptr;
  DeviceArrays::Places places_;
};

}  // namespace pycoll
