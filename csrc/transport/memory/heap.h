// Memory that every rank of a host reaches directly, as allocated by comm.empty().
//
// Each rank owns an area of one sparse memfd that all ranks map. A pointer into the own area is an
// offset that means the same bytes on every peer: ranks send no handles, and an allocation needs no
// setup on peers. Freeing an allocation returns its pages to the system. Ranks that are threads
// share an address space, so they reach every pointer.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/fd.h"
#include "transport/memory/registered_arrays.h"

namespace pycoll {

class SharedHeap {
 public:
  /// Bytes of address space for each of `num_ranks` ranks: the size of the host's memory, so that
  /// memory runs out first. 0 if the process may not reserve that much.
  static size_t area_bytes(int num_ranks);

  /// Maps the areas of all ranks, which start at byte `file_offset` of `memory`. Null if the system
  /// refuses (an address space limit): the rank can then neither allocate nor access peers' areas.
  static std::shared_ptr<SharedHeap> map(const Fd& memory, size_t file_offset, int rank,
                                         int num_ranks);
  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// Called when a transport starts and stops using the heap. The last leave() closes the
  /// descriptor: allocations stay valid while they have an owner, but no new ones are possible.
  void enter();
  void leave();

  /// Allocates zeroed, page-aligned memory in the own area. Raises SystemError if none is left.
  std::byte* allocate(size_t nbytes);
  void free(std::byte* memory);
  /// Takes away from all peers the array that contains `p`: an allocation of allocate(), or a
  /// registered array. Its content and address stay. Its part of the heap is never used again,
  /// because a peer that is late may still write it.
  void withdraw(std::byte* p);

  /// Maps `nbytes` of the heap at `memory` over the pages at `place`; both are page-aligned.
  /// Returns false and sets errno on failure.
  bool map_at(std::byte* place, std::byte* memory, size_t nbytes);
  /// The arrays that any communicator of this process has registered.
  RegisteredArrays& registered() { return registered_; }

  /// Whether [p, p + nbytes) lies in the own area, and was not withdrawn.
  bool contains(const void* p, size_t nbytes) const {
    const auto offset = static_cast<size_t>(static_cast<const std::byte*>(p) - own_);
    return p >= own_ && offset < area_bytes_ && nbytes <= area_bytes_ - offset &&
           (!has_withdrawn_ || !is_withdrawn(p));
  }
  /// Offset of the bytes at `p`, identical on all ranks.
  uint64_t offset_of(const void* p) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(p) - base_);
  }
  std::byte* at(uint64_t offset) const { return base_ + offset; }

  size_t allocated_bytes() const;

 private:
  bool is_withdrawn(const void* p) const;
  /// The allocation that contains `p`; end() if there is none. Needs the lock.
  std::map<std::byte*, size_t>::const_iterator allocation_of(const std::byte* p) const;

  SharedHeap(Fd memory, size_t file_offset, std::byte* base, size_t area_bytes, int rank,
             int num_ranks);

  Fd memory_;
  int num_transports_ = 0;
  pid_t pid_;  // a forked process shares the memory and must not free it
  size_t file_offset_;
  std::byte* base_;
  size_t area_bytes_;
  int num_ranks_;
  std::byte* own_;
  mutable std::mutex mutex_;
  std::map<std::byte*, size_t> taken_;  // size by address
  std::set<std::byte*> withdrawn_;      // allocations that are private pages in this process
  std::atomic<bool> has_withdrawn_{false};
  RegisteredArrays registered_;  // last: its destructor frees regions of this heap
};

}  // namespace pycoll
