// Arrays that are moved into the shared heap without their user's asking, because they come again
// and again: tensors of the torch backend, and NumPy's arrays.
//
// It must change nothing but speed. So the content moves once, when the caller has the array for
// itself, and never back: an array's owner says when it is dead, and its pages are then replaced by
// fresh ones. And a process that is forked meanwhile gets a copy of its own, as it does of ordinary
// memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "transport/memory/heap.h"

namespace pycoll {

class CachedArray {
 public:
  /// Of `[data, data + nbytes)`, which stays where it is until attach().
  CachedArray(std::byte* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}
  CachedArray(const CachedArray&) = delete;
  CachedArray& operator=(const CachedArray&) = delete;

  /// Moves it. Nobody else may write it meanwhile. Nothing happens where it cannot move, or is
  /// reached already, or dead.
  void attach(const std::shared_ptr<SharedHeap>& heap);
  /// The array is dead: its memory is about to be freed, and nobody reads it any more. Once, on any
  /// thread. In a process forked off since, nothing is left to do.
  void end();

 private:
  friend class ForkGuard;

  std::byte* data_;
  size_t nbytes_;
  bool ended_ = false;
  std::shared_ptr<SharedHeap> heap_;  // once it has moved
  pid_t pid_ = 0;
  std::byte* pages_ = nullptr;  // those that moved
  size_t pages_bytes_ = 0;
  void* copy_ = nullptr;  // of them, for a process that is being forked
};

}  // namespace pycoll
