#include "comm/device/device_links.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace pycoll {
namespace {

// Bytes of the words with which ranks test their access (DeviceWindow::test).
constexpr size_t kTestBytes = 4096;
// kSimple. A block of 512 threads moves 32 KiB at a time; below 8 KiB a slot is not worth its flag.
constexpr int64_t kLeastSlotBytes = 8 << 10;
constexpr int64_t kMostSlotBytes = 64 << 10;
static_assert(kTestBytes >= kMaxDeviceRanks * sizeof(uint64_t));
static_assert(kMaxDeviceRanks <= DeviceWords::kMax);

/// Offsets of one protocol's rings, [channel * num_ranks + peer], in a rank's window: the tails
/// that the peer writes, the heads that it releases, and the slots that it fills.
struct Region {
  size_t tails = 0;
  size_t heads = 0;
  size_t slots = 0;
  size_t end = 0;
};

struct Layout {
  std::array<Region, kNumDeviceProtocols> regions;
  size_t num_rings;

  explicit Layout(const DeviceRings& rings)
      : num_rings(static_cast<size_t>(rings.num_ranks) * static_cast<size_t>(rings.num_channels)) {
    size_t at = kTestBytes;
    for (int p = 0; p < kNumDeviceProtocols; ++p) {
      Region& region = regions[static_cast<size_t>(p)];
      const size_t ring_bytes = bytes_of(static_cast<DeviceProtocol>(p), rings);
      region.tails = at;
      region.heads = region.tails + num_rings * sizeof(FlagLine);
      region.slots = region.heads + num_rings * sizeof(FlagLine);
      region.end = at = region.slots + num_rings * ring_bytes;
    }
  }
  static size_t bytes_of(DeviceProtocol protocol, const DeviceRings& rings) {
    const DeviceRingShape shape = rings.shape(protocol);
    return static_cast<size_t>(shape.num_slots) * static_cast<size_t>(shape.slot_bytes);
  }
};

/// Bytes of a slot of kSimple with which all slots of all ranks take at most half of the cache.
int64_t slot_bytes_in_cache(const DeviceRings& rings) {
  const int64_t num_slots =
      int64_t{kMaxSlots} * rings.num_ranks * (rings.num_ranks - 1) * rings.num_channels;
  const auto share = static_cast<uint64_t>(rings.cache_bytes / 2 / std::max<int64_t>(num_slots, 1));
  return std::clamp(static_cast<int64_t>(std::bit_floor(share)), kLeastSlotBytes, kMostSlotBytes);
}

}  // namespace

DeviceRingShape DeviceRings::shape(DeviceProtocol protocol) const {
  const bool many = num_ranks > 16;  // the number of rings grows with the pairs of ranks
  switch (protocol) {
    case DeviceProtocol::kSimple:
      if (cache_bytes != 0 && !many) return {kMaxSlots, slot_bytes_in_cache(*this)};
      return {kMaxSlots, many ? 16 << 10 : kMostSlotBytes};
    case DeviceProtocol::kLL:
      return {kMaxSlots, many ? 4 << 10 : 16 << 10};
    case DeviceProtocol::kLL128:
      return {kMaxSlots, many ? 8 << 10 : 32 << 10};
    case DeviceProtocol::kPoison:
      return {2 * kPoisonBuffers,
              many ? 8 << 10 : 32 << 10};  // two messages per link, for two_shot
    case DeviceProtocol::kDirect:
      return {kMaxSlots, 0};  // tails and heads only
  }
  return {};
}

size_t DeviceLinkMemory::window_bytes(const DeviceRings& rings) {
  return Layout(rings).regions.back().end;
}

DeviceLinkMemory::DeviceLinkMemory(const Device& device, const DeviceWindow& window, int rank,
                                   const DeviceRings& rings)
    : rings_(rings) {
  const int num_ranks = rings.num_ranks;
  const int num_channels = rings.num_channels;
  const Layout layout(rings);
  const size_t num_rings = layout.num_rings;
  // For each protocol: tables of send rings, receive rings, states and epochs. Then the failed
  // word.
  const size_t protocol_bytes = num_rings * (2 * sizeof(DeviceRing) + sizeof(DeviceRingState)) +
                                static_cast<size_t>(num_channels) * sizeof(uint64_t);
  std::vector<std::byte> bytes(kNumDeviceProtocols * protocol_bytes + sizeof(uint64_t));
  tables_ = DeviceMemory(device, bytes.size());
  for (size_t p = 0; p < kNumDeviceProtocols; ++p) {
    const auto protocol = static_cast<DeviceProtocol>(p);
    const Region& region = layout.regions[p];
    const size_t ring_bytes = Layout::bytes_of(protocol, rings);
    std::vector<DeviceRing> send(num_rings);
    std::vector<DeviceRing> recv(num_rings);
    for (size_t c = 0; c < static_cast<size_t>(num_channels); ++c) {
      for (int peer = 0; peer < num_ranks; ++peer) {
        const auto n = static_cast<size_t>(num_ranks);
        const size_t mine = c * n + static_cast<size_t>(rank);    // this rank's ring at the peer
        const size_t theirs = c * n + static_cast<size_t>(peer);  // the peer's ring here
        std::byte* const here = window.at(rank);
        std::byte* const there = window.at(peer);
        const auto tail = [&](std::byte* base, size_t ring) {
          return reinterpret_cast<FlagLine*>(base + region.tails + ring * sizeof(FlagLine));
        };
        const auto head = [&](std::byte* base, size_t ring) {
          return reinterpret_cast<uint64_t*>(base + region.heads + ring * sizeof(FlagLine));
        };
        send[theirs] = {there + region.slots + mine * ring_bytes, tail(there, mine),
                        head(here, theirs)};
        recv[theirs] = {here + region.slots + theirs * ring_bytes, tail(here, theirs),
                        head(there, mine)};
      }
    }
    std::byte* const to = bytes.data() + p * protocol_bytes;
    std::byte* const on_device = tables_.data() + p * protocol_bytes;
    const size_t table_bytes = num_rings * sizeof(DeviceRing);
    std::memcpy(to, send.data(), table_bytes);
    std::memcpy(to + table_bytes, recv.data(), table_bytes);
    const DeviceRingShape shape = rings.shape(protocol);
    DeviceLinks& links = links_[p];
    links.send = reinterpret_cast<const DeviceRing*>(on_device);
    links.recv = reinterpret_cast<const DeviceRing*>(on_device + table_bytes);
    links.states = reinterpret_cast<DeviceRingState*>(on_device + 2 * table_bytes);
    links.epochs = reinterpret_cast<uint64_t*>(on_device + 2 * table_bytes +
                                               num_rings * sizeof(DeviceRingState));
    links.slot_bytes = shape.slot_bytes;
    links.num_slots = shape.num_slots;
  }
  failed_ = reinterpret_cast<uint64_t*>(tables_.data() + kNumDeviceProtocols * protocol_bytes);
  device.copy_now(tables_.data(), bytes.data(), bytes.size());
  const Region& poison = layout.regions[static_cast<size_t>(DeviceProtocol::kPoison)];
  const std::vector<std::byte> poisoned(poison.end - poison.slots,
                                        static_cast<std::byte>(kPoisonByte));
  device.copy_now(window.at(rank) + poison.slots, poisoned.data(), poisoned.size());
}

}  // namespace pycoll
