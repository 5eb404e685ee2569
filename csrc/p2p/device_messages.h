// Messages whose bytes are in device memory: they go from device to device of a host, and not
// through CPU memory.
//
// The sender copies its array to memory of a pool that other processes can map, and announces the
// message as any large one. The matching receive maps that memory, once for each allocation, and
// copies the bytes to its own array. It takes the descriptor of the memory from the sender's
// process, so the ranks set nothing up together. If that is not possible, or if only one end is on
// a device, the sender sends parts through the mailbox, as for arrays in CPU memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "device/device.h"
#include "transport/memory/peer_memory.h"

namespace pycoll {

class Transport;

/// Where other ranks find the bytes of a message. They read it from the sender's memory.
struct DeviceOffer {
  DeviceHandle handle{};
  uint64_t allocation = 0;  // its number on the sender
  uint64_t address = 0;     // in the sender's process
  int32_t fd = -1;          // of the sender's process; -1: none
  int32_t device = -1;      // of the sender
};

class DeviceMessages {
 public:
  DeviceMessages(Transport& transport, PeerMemory& peer_memory)
      : transport_(transport), peer_memory_(peer_memory) {}
  DeviceMessages(const DeviceMessages&) = delete;
  ~DeviceMessages() { release(); }

  /// A message up to this size goes through the mailbox, so that its send need not wait.
  static constexpr size_t kMaxMailboxBytes = 64 << 10;

  /// The bytes of a send, for as long as it is under way.
  class Bytes;
  /// Queues a copy of `nbytes` bytes on `stream`. The message may start when the copy is over. May
  /// be called by any thread. Raises CudaError.
  std::shared_ptr<Bytes> stage(const Device& device, const void* src, size_t nbytes,
                               DeviceStream stream);

  // --- for the engine, by one thread at a time
  /// Copies bytes, of which an end is memory of `device`, and waits. Raises CudaError.
  void copy(int device, void* dst, const void* src, size_t nbytes);
  /// Where `device` accesses the bytes of the offer at `address` in the memory of `source`; null:
  /// it does not.
  const std::byte* find(int source, uint64_t address, int device);

  /// Releases what it has mapped and allocated. No message is under way.
  void release();

 private:
  struct Pool;

  Transport& transport_;
  PeerMemory& peer_memory_;
  std::mutex mutex_;  // guards pool_
  std::shared_ptr<Pool> pool_;
  std::map<int, Stream> streams_;  // by device
  // Mapped memory, by the sender and the number of its allocation. Null: it cannot be mapped.
  std::map<std::pair<int, uint64_t>, std::byte*> mapped_;
};

/// Memory for the bytes of a send, which goes back to the pool at the end.
class DeviceMessages::Bytes {
 public:
  Bytes(std::shared_ptr<Pool> pool, size_t index) : pool_(std::move(pool)), index_(index) {}
  Bytes(const Bytes&) = delete;
  ~Bytes();

  std::byte* data() const;
  const DeviceOffer* offer() const;

 private:
  std::shared_ptr<Pool> pool_;
  size_t index_;
};

}  // namespace pycoll
