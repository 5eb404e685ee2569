// Callers' own arrays whose pages lie in the shared heap: what comm.register() makes of them.
//
// The whole pages of an array are moved into the heap and mapped back to where they were: the
// array stays where its owner knows it, and peers reach the same bytes. What shares its first and
// last page with others cannot move. Those edges have a shadow in the heap, beside the pages: it
// is brought up to date before peers read it, and copied back after they wrote it.
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
  /// Moves `[data, data + nbytes)`. Nobody else may write it meanwhile. Raises UsageError when it
  /// is not memory of this process alone, SystemError when the heap has no room.
  RegisteredArray(SharedHeap& heap, std::byte* data, size_t nbytes);
  /// Moves it back.
  ~RegisteredArray();
  /// Puts fresh pages in the place of those that moved, whose content nobody needs any more.
  void drop_content();
  RegisteredArray(const RegisteredArray&) = delete;
  RegisteredArray& operator=(const RegisteredArray&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  /// Those that moved.
  std::byte* pages() const { return pages_; }
  size_t pages_bytes() const { return pages_bytes_; }
  bool contains(const std::byte* p, size_t nbytes) const {
    return p >= data_ && nbytes <= nbytes_ && static_cast<size_t>(p - data_) <= nbytes_ - nbytes;
  }
  /// Where in the heap the bytes at `p`, within the array, are.
  std::byte* in_heap(const std::byte* p) const { return heap_at_ + (p - data_); }
  /// Copies what of `[p, p + nbytes)` lies on the edges into the heap, or out of it.
  void copy_edges_in(const std::byte* p, size_t nbytes) const;
  void copy_edges_out(std::byte* p, size_t nbytes) const;

 private:
  template <class Copy>
  void for_edges(const std::byte* p, size_t nbytes, Copy copy) const;

  SharedHeap& heap_;
  std::byte* data_;
  size_t nbytes_;
  std::byte* pages_;  // the whole ones
  size_t pages_bytes_;
  std::byte* region_;   // of the heap
  std::byte* heap_at_;  // data_'s place in it
};

/// All of one process. Any thread may call.
class RegisteredArrays {
 public:
  /// `keep_alive` is held until the array is removed. Nothing happens when the range lies within
  /// one that is there, but that it is counted. Raises UsageError when it overlaps one in part.
  const RegisteredArray& add(SharedHeap& heap, std::byte* data, size_t nbytes,
                             std::shared_ptr<void> keep_alive);
  /// Takes back one add(). False when there was none.
  bool remove(std::byte* data);
  /// Takes back the add() of an array whose content nobody needs any more.
  void forget(std::byte* data);

  /// The array that holds `[p, p + nbytes)`; null when there is none.
  const RegisteredArray* find(const void* p, size_t nbytes) const;

 private:
  struct Entry {
    std::unique_ptr<RegisteredArray> array;
    std::shared_ptr<void> keep_alive;
    int num_adds = 1;
  };

  std::atomic<int> size_{0};  // so that who has none pays no lock; the mutex orders the rest
  mutable std::mutex mutex_;
  std::map<std::byte*, Entry, std::greater<>> entries_;  // by start, the last one first
};

}  // namespace pycoll
