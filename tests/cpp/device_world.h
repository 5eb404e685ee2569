// The memory of all ranks' device links of one protocol, in one process: of CPU memory for checks
// that launch on host threads, or of whatever else kernels reach.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory_resource>
#include <vector>

#include "executor/device/device_launch.h"

namespace pycoll {

/// The number of slots of a ring that has room for `num` messages.
inline int power_of_two(int num) {
  return static_cast<int>(std::bit_ceil(static_cast<unsigned>(num)));
}

struct DeviceWorldShape {
  int num_ranks = 2;
  DeviceProtocol protocol = DeviceProtocol::kSimple;
  int num_channels = 2;
  int64_t slot_bytes = 1024;
  int num_slots = 2;
};

class DeviceWorld {
 public:
  /// Kernels see each place of `memory` `shift` bytes behind where the host sees it.
  explicit DeviceWorld(const DeviceWorldShape& shape,
                       std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
                       ptrdiff_t shift = 0)
      : shape_(shape), shift_(shift), ranks_(memory), abort_word_(1, memory) {
    const int n = shape.num_ranks;
    const auto byte = static_cast<std::byte>(
        shape.protocol == DeviceProtocol::kPoison ? kPoisonByte : uint8_t{0});
    for (int rank = 0; rank < n; ++rank) {
      Rank& its = ranks_.emplace_back(
          Rank{std::pmr::vector<DeviceRing>(num_rings(), memory),
               std::pmr::vector<DeviceRing>(num_rings(), memory),
               std::pmr::vector<DeviceRingState>(num_rings(), memory),
               std::pmr::vector<uint64_t>(static_cast<size_t>(shape.num_channels), memory),
               std::pmr::vector<FlagLine>(num_rings(), memory),
               std::pmr::vector<FlagLine>(num_rings(), memory),
               std::pmr::vector<Line>(num_rings() * ring_bytes() / sizeof(Line), memory),
               std::pmr::vector<DeviceReport>(1, memory), std::pmr::vector<uint64_t>(1, memory)});
      std::memset(its.slots.data(), static_cast<int>(byte), num_rings() * ring_bytes());
    }
    for (int channel = 0; channel < shape.num_channels; ++channel) {
      for (int writer = 0; writer < n; ++writer) {
        for (int reader = 0; reader < n; ++reader) connect(channel, writer, reader);
      }
    }
  }

  /// What a launch of `rank` needs of it, and of a launch of the world.
  void set_up(DeviceLaunch& launch, int rank) {
    Rank& memory = ranks_[static_cast<size_t>(rank)];
    launch.protocol = shape_.protocol;
    launch.num_channels = shape_.num_channels;
    launch.links = {seen(memory.send.data()),   seen(memory.recv.data()),
                    seen(memory.states.data()), seen(memory.epochs.data()),
                    shape_.slot_bytes,          shape_.num_slots};
    launch.abort_word = seen(&abort_word());
    launch.report = seen(memory.report.data());
    launch.failed = seen(memory.failed.data());
  }
  const DeviceWorldShape& shape() const { return shape_; }
  DeviceError error(int rank) const {
    const uint64_t word = ranks_[static_cast<size_t>(rank)].report[0].error;
    return __builtin_bit_cast(DeviceError, word);
  }
  /// The number of the operation that failed.
  uint64_t failed_operation(int rank) const {
    return ranks_[static_cast<size_t>(rank)].report[0].operation;
  }
  /// True when every byte of the slots is poison again.
  bool is_poisoned() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
      // Each byte equals the next one: many times as fast as a loop, above all under a sanitizer.
      const uint8_t* const bytes = rank.slots[0].bytes;
      const size_t size = rank.slots.size() * sizeof(Line);
      return bytes[0] == kPoisonByte && std::memcmp(bytes, bytes + 1, size - 1) == 0;
    });
  }

  uint64_t& abort_word() { return abort_word_[0]; }

 private:
  struct alignas(kDeviceAlignment) Line {
    uint8_t bytes[kDeviceAlignment];
  };
  struct Rank {
    std::pmr::vector<DeviceRing> send;
    std::pmr::vector<DeviceRing> recv;
    std::pmr::vector<DeviceRingState> states;
    std::pmr::vector<uint64_t> epochs;
    std::pmr::vector<FlagLine> tails;  // of what this rank reads
    std::pmr::vector<FlagLine> heads;  // of what this rank writes
    std::pmr::vector<Line> slots;      // of what this rank reads
    std::pmr::vector<DeviceReport> report;
    std::pmr::vector<uint64_t> failed;
  };

  size_t num_rings() const {
    return static_cast<size_t>(shape_.num_channels) * static_cast<size_t>(shape_.num_ranks);
  }
  size_t ring_bytes() const {
    return static_cast<size_t>(shape_.slot_bytes) * static_cast<size_t>(shape_.num_slots);
  }
  size_t at(int channel, int peer) const {
    return static_cast<size_t>(channel) * static_cast<size_t>(shape_.num_ranks) +
           static_cast<size_t>(peer);
  }
  template <class T>
  T* seen(T* p) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(shift_));
  }
  void connect(int channel, int writer, int reader) {
    Rank& to = ranks_[static_cast<size_t>(reader)];
    Rank& from = ranks_[static_cast<size_t>(writer)];
    const size_t in = at(channel, writer);
    const size_t out = at(channel, reader);
    const DeviceRing ring = {
        seen(reinterpret_cast<std::byte*>(to.slots.data()) + in * ring_bytes()),
        seen(&to.tails[in]), seen(&from.heads[out].value)};
    from.send[out] = ring;
    to.recv[in] = ring;
  }

  DeviceWorldShape shape_;
  ptrdiff_t shift_;
  std::pmr::vector<Rank> ranks_;
  std::pmr::vector<uint64_t> abort_word_;
};

}  // namespace pycoll
