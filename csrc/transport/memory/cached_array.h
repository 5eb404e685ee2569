// An entry of the registration cache: an array that is registered automatically because it is used
// repeatedly. Tensors of the torch backend and NumPy arrays use it.
//
// The cache must affect speed only. The content moves to the shared heap once, while the caller has
// exclusive access to the array. When the array's owner reports its end, fresh pages replace those
// that moved; the content moves back only if the owner resizes the array. A forked process gets its
// own copy of the pages, as of ordinary memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "transport/memory/heap.h"

namespace pycoll {

class CachedArray {
 public:
  /// An entry for `[data, data + nbytes)`, which stays private until attach().
  CachedArray(std::byte* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}
  CachedArray(const CachedArray&) = delete;
  CachedArray& operator=(const CachedArray&) = delete;

  /// Moves the array into the heap. No other thread may write it meanwhile. Does nothing if it
  /// cannot move, has already moved, or has ended.
  void attach(const std::shared_ptr<SharedHeap>& heap);
  enum class Content : uint8_t { kMayGo, kStays };
  /// Call once, on any thread, when the array's memory is about to be freed and is no longer read,
  /// or, with kStays, is about to be moved. Does nothing in a process forked since attach().
  void end(Content content = Content::kMayGo);

 private:
  friend class ForkGuard;

  std::byte* data_;
  size_t nbytes_;
  bool ended_ = false;
  std::shared_ptr<SharedHeap> heap_;  // set once the array has moved
  pid_t pid_ = 0;
  std::byte* pages_ = nullptr;  // the pages that moved
  size_t pages_bytes_ = 0;
  void* copy_ = nullptr;  // of the pages, for a process being forked
};

}  // namespace pycoll
