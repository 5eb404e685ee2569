// The memory of all ranks' device links of one protocol, made of host memory, for checks that
// launch on host threads.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "executor/device_launch.h"

namespace pycoll {

struct DeviceWorldShape {
  int num_ranks = 2;
  DeviceProtocol protocol = DeviceProtocol::kSimple;
  int num_channels = 2;
  int64_t slot_bytes = 1024;
  int num_slots = 2;
};

class DeviceWorld {
 public:
  explicit DeviceWorld(const DeviceWorldShape& shape) : shape_(shape) {
    const int n = shape.num_ranks;
    for (int rank = 0; rank < n; ++rank) ranks_.emplace_back(std::make_unique<Rank>());
    for (int rank = 0; rank < n; ++rank) {
      Rank& memory = *ranks_[static_cast<size_t>(rank)];
      memory.send.resize(num_rings());
      memory.recv.resize(num_rings());
      memory.states.resize(num_rings());
      memory.epochs.resize(static_cast<size_t>(shape.num_channels));
      memory.tails.resize(num_rings());
      memory.heads.resize(num_rings());
      memory.slots = allocate(num_rings() * ring_bytes());
      std::memset(memory.slots.get(), shape.protocol == DeviceProtocol::kPoison ? kPoisonByte : 0,
                  num_rings() * ring_bytes());
    }
    for (int channel = 0; channel < shape.num_channels; ++channel) {
      for (int writer = 0; writer < n; ++writer) {
        for (int reader = 0; reader < n; ++reader) connect(channel, writer, reader);
      }
    }
  }

  /// What a launch of `rank` needs of it, and of a launch of the world.
  void set_up(DeviceLaunch& launch, int rank) {
    Rank& memory = *ranks_[static_cast<size_t>(rank)];
    launch.protocol = shape_.protocol;
    launch.num_channels = shape_.num_channels;
    launch.links = {memory.send.data(),   memory.recv.data(), memory.states.data(),
                    memory.epochs.data(), shape_.slot_bytes,  shape_.num_slots};
    launch.abort_word = &abort_word;
    launch.report = &memory.report;
    launch.failed = &memory.failed;
  }
  const DeviceWorldShape& shape() const { return shape_; }
  DeviceError error(int rank) const {
    const uint64_t word = ranks_[static_cast<size_t>(rank)]->report.error;
    return __builtin_bit_cast(DeviceError, word);
  }
  /// Of the operation that failed.
  uint64_t failed_operation(int rank) const {
    return ranks_[static_cast<size_t>(rank)]->report.operation;
  }
  /// True when every byte of the slots is poison again.
  bool is_poisoned() const {
    for (const auto& rank : ranks_) {
      for (size_t i = 0; i < num_rings() * ring_bytes(); ++i) {
        if (rank->slots.get()[i] != std::byte{kPoisonByte}) return false;
      }
    }
    return true;
  }

  uint64_t abort_word = 0;

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  struct Rank {
    std::vector<DeviceRing> send;
    std::vector<DeviceRing> recv;
    std::vector<DeviceRingState> states;
    std::vector<uint64_t> epochs;
    std::vector<FlagLine> tails;  // of what this rank reads
    std::vector<FlagLine> heads;  // of what this rank writes
    Memory slots;                 // of what this rank reads
    DeviceReport report;
    uint64_t failed = 0;
  };

  static Memory allocate(size_t num_bytes) {
    return Memory(static_cast<std::byte*>(std::aligned_alloc(kDeviceAlignment, num_bytes)));
  }
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
  void connect(int channel, int writer, int reader) {
    Rank& to = *ranks_[static_cast<size_t>(reader)];
    Rank& from = *ranks_[static_cast<size_t>(writer)];
    const size_t in = at(channel, writer);
    const size_t out = at(channel, reader);
    const DeviceRing ring = {to.slots.get() + in * ring_bytes(), &to.tails[in],
                             &from.heads[out].value};
    from.send[out] = ring;
    to.recv[in] = ring;
  }

  DeviceWorldShape shape_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace pycoll
