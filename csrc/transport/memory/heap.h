// Memory that every rank of a host reaches directly: what comm.empty() gives.
//
// Each rank owns an area of one sparse memfd that all ranks map. A pointer into the own area is an
// offset that means the same bytes to every peer: no handles travel, and nothing is set up per
// allocation. Pages exist from the first touch on, and go back to the system when an allocation is
// freed. Ranks that are threads share an address space: there every pointer is reachable.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/fd.h"
#include "transport/memory/registered_arrays.h"

namespace pycoll {

class SharedHeap {
 public:
  /// Bytes of address space that each of `num_ranks` ranks gets: as much as the host has memory,
  /// so that the space never runs out first. 0 where the process may not have that much.
  static size_t area_bytes(int num_ranks);

  /// Maps the areas of all ranks, which start at byte `file_offset` of `memory`. Null when the
  /// system refuses (an address space limit): such a rank can neither allocate nor reach.
  static std::shared_ptr<SharedHeap> map(const Fd& memory, size_t file_offset, int rank,
                                         int num_ranks);
  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// A transport begins to use it, or ends. With the last one its descriptor goes; what was
  /// allocated stays as long as somebody has it, and nothing more can be.
  void enter();
  void leave();

  /// Zeroed, page-aligned memory of the own area. Raises SystemError when there is none.
  std::byte* allocate(size_t nbytes);
  void free(std::byte* memory);

  /// Maps `nbytes` of the heap at `place`, in place of what is there; both start a page. False,
  /// with errno, when the system refuses.
  bool map_at(std::byte* place, std::byte* memory, size_t nbytes);
  /// Of this process, by whichever communicator.
  RegisteredArrays& registered() { return registered_; }

  /// Whether [p, p + nbytes) lies in the own area.
  bool contains(const void* p, size_t nbytes) const {
    const auto offset = static_cast<size_t>(static_cast<const std::byte*>(p) - own_);
    return p >= own_ && offset < area_bytes_ && nbytes <= area_bytes_ - offset;
  }
  /// The same number on all ranks for the same bytes.
  uint64_t offset_of(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - base_);
  }
  std::byte* at(uint64_t offset) const { return base_ + offset; }

  size_t allocated_bytes() const;

 private:
  SharedHeap(Fd memory, size_t file_offset, std::byte* base, size_t area_bytes, int rank,
             int num_ranks);

  Fd memory_;
  int num_transports_ = 0;
  pid_t pid_;  // a process forked later shares the memory, which is not its to free
  size_t file_offset_;
  std::byte* base_;
  size_t area_bytes_;
  int num_ranks_;
  std::byte* own_;
  mutable std::mutex mutex_;
  std::map<std::byte*, size_t> taken_;  // by address
  RegisteredArrays registered_;         // last: it gives its regions back
};

}  // namespace pycoll
