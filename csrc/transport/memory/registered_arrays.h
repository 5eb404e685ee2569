// The caller's own arrays whose pages lie in the shared heap after comm.register().
//
// The whole pages of an array are moved into the heap and mapped back at their old addresses: the
// array keeps its address, and peers reach the same bytes. Other data may share the array's first
// and last page, so these edges cannot move. They have a copy in the heap, next to the pages, which
// is updated before peers read it and copied back after peers wrote it.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace pycoll {

class SharedHeap;

class RegisteredArray {
 public:
  /// Moves `[data, data + nbytes)` into the heap. No other thread may write it meanwhile. Raises
  /// UsageError if it is not private memory of this process, SystemError if the heap has no room.
  RegisteredArray(SharedHeap& heap, std::byte* data, size_t nbytes);
  /// Moves the array back.
  ~RegisteredArray();
  /// Replaces the pages that moved by fresh ones, and drops their content.
  void drop_content();
  /// Moves the array back for good, and never uses its region of the heap again, because a peer may
  /// still write it. False if the system has no memory for the pages.
  bool withdraw();
  RegisteredArray(const RegisteredArray&) = delete;
  RegisteredArray& operator=(const RegisteredArray&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  /// The pages that moved.
  std::byte* pages() const { return pages_; }
  size_t pages_bytes() const { return pages_bytes_; }
  bool contains(const std::byte* p, size_t nbytes) const {
    return p >= data_ && nbytes <= nbytes_ && static_cast<size_t>(p - data_) <= nbytes_ - nbytes;
  }
  /// Heap address of the bytes at `p`, which lies within the array.
  std::byte* in_heap(const std::byte* p) const { return heap_at_ + (p - data_); }
  /// Copies the part of `[p, p + nbytes)` on the edges into the heap, or out of it.
  void copy_edges_in(const std::byte* p, size_t nbytes) const;
  void copy_edges_out(std::byte* p, size_t nbytes) const;

 private:
  template <class Copy>
  void for_edges(const std::byte* p, size_t nbytes, Copy copy) const;

  SharedHeap& heap_;
  std::byte* data_;
  size_t nbytes_;
  std::byte* pages_;  // whole pages of the array
  size_t pages_bytes_;
  std::byte* region_;   // in the heap
  std::byte* heap_at_;  // the place of data_ in the heap
  bool is_withdrawn_ = false;
};

/// All registered arrays of one process. Any thread may call it.
class RegisteredArrays {
 public:
  /// Registers an array, and holds `keep_alive` until it is removed. A range within a registered
  /// array only increments that array's count. Raises UsageError for a partial overlap.
  const RegisteredArray& add(SharedHeap& heap, std::byte* data, size_t nbytes,
                             std::shared_ptr<void> keep_alive);
  /// Undoes one add(). False if the array is not registered.
  bool remove(std::byte* data);
  /// Undoes the add() of an array whose content may be dropped.
  void forget(std::byte* data);

  /// Withdraws and removes the array that contains `p`, if there is one, whatever its count. False
  /// if the system has no memory for it.
  bool withdraw(const std::byte* p);

  /// The array that contains `[p, p + nbytes)`; null if there is none.
  const RegisteredArray* find(const void* p, size_t nbytes) const;

 private:
  struct Entry {
    std::unique_ptr<RegisteredArray> array;
    std::shared_ptr<void> keep_alive;
    int num_adds = 1;
  };

  std::atomic<int> size_{0};  // skips the lock while it is 0; the mutex orders the rest
  mutable std::mutex mutex_;
  std::map<std::byte*, Entry, std::greater<>> entries_;  // by start, in descending order
};

}  // namespace pycoll
