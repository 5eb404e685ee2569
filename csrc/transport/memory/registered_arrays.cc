#include "transport/memory/registered_arrays.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/error.h"
#include "base/pages.h"
#include "transport/memory/heap.h"
#include "transport/memory/mapping.h"

namespace pycoll {
namespace {

constexpr size_t kLargeArray = 4 * kLargePage;

std::byte* page_down(std::byte* p) { return p - reinterpret_cast<uintptr_t>(p) % kPage; }
std::byte* page_up(std::byte* p) { return page_down(p + (kPage - 1)); }

/// Raises UsageError unless all pages are private, writable, anonymous memory: moving the pages of
/// a file, or pages that are already shared, would detach them from it.
void check_private(const std::byte* begin, const std::byte* end) {
  auto at = reinterpret_cast<uintptr_t>(begin);
  const auto last = reinterpret_cast<uintptr_t>(end);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; at < last && std::getline(maps, line);) {
    unsigned long from = 0, to = 0, inode = 0;
    char rights[5] = "";
    int name_at = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %lu %n", &from, &to, rights, &inode,
                    &name_at) != 4 ||
        to <= at) {
      continue;
    }
    const std::string name = line.substr(static_cast<size_t>(name_at));
    const bool anonymous =
        inode == 0 && (name.empty() || name == "[heap]" || name.starts_with("[anon"));
    if (from > at || std::strcmp(rights, "rw-p") != 0 || !anonymous) {
      throw UsageError(
          "x cannot be registered: its memory is " +
          (name.empty() ? std::string("mapped ") + rights : name) +
          ", expected ordinary memory of this process; copy it into an array of comm.empty()");
    }
    at = to;
  }
  if (at < last) throw UsageError("x cannot be registered: part of its memory is not mapped");
}

/// Writes nothing if the bytes are there already. Their lines then stay in the caches of the cores
/// that read them or wrote them last.
void update(std::byte* to, const std::byte* from, size_t nbytes) {
  if (std::memcmp(to, from, nbytes) != 0) std::memcpy(to, from, nbytes);
}

}  // namespace

RegisteredArray::RegisteredArray(SharedHeap& heap, std::byte* data, size_t nbytes)
    : heap_(heap), data_(data), nbytes_(nbytes), pages_(page_up(data)) {
  std::byte* const pages_end = page_down(data + nbytes);
  pages_bytes_ = pages_end > pages_ ? static_cast<size_t>(pages_end - pages_) : 0;
  if (pages_bytes_ != 0) check_private(pages_, pages_end);
  // Keep the offset of the array within its page: within a large page for a large array, so that
  // the owner's mapping can use large pages too.
  const size_t page = nbytes >= kLargeArray ? kLargePage : kPage;
  const size_t into_page = reinterpret_cast<uintptr_t>(data) % page;
  region_ = heap.allocate(into_page + nbytes);
  heap_at_ = region_ + into_page;
  std::memcpy(heap_at_, data, nbytes);
  if (pages_bytes_ != 0 && !heap.map_at(pages_, in_heap(pages_), pages_bytes_)) {
    heap.free(region_);
    throw_system_error("moving " + std::to_string(nbytes) + " bytes into shared memory");
  }
}

RegisteredArray::~RegisteredArray() {
  if (is_withdrawn_) return;
  // Without memory for the move, the array stays in the heap, and its region is never freed.
  if (pages_bytes_ == 0 || become_private(pages_, pages_bytes_)) heap_.free(region_);
}

bool RegisteredArray::withdraw() {
  is_withdrawn_ = true;
  return pages_bytes_ == 0 || become_private(pages_, pages_bytes_);
}

void RegisteredArray::drop_content() {
  if (pages_bytes_ == 0) return;
  void* fresh = ::mmap(pages_, pages_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (fresh != MAP_FAILED) pages_bytes_ = 0;
}

template <class Copy>
void RegisteredArray::for_edges(const std::byte* p, size_t nbytes, Copy copy) const {
  const std::byte* const end = p + nbytes;
  const std::byte* const head_end =
      pages_bytes_ == 0 ? end : std::min<const std::byte*>(end, pages_);
  if (p < head_end) copy(p - data_, static_cast<size_t>(head_end - p));
  if (pages_bytes_ == 0) return;
  const std::byte* const tail = std::max<const std::byte*>(p, pages_ + pages_bytes_);
  if (tail < end) copy(tail - data_, static_cast<size_t>(end - tail));
}

void RegisteredArray::copy_edges_in(const std::byte* p, size_t nbytes) const {
  for_edges(p, nbytes,
            [this](ptrdiff_t at, size_t size) { update(heap_at_ + at, data_ + at, size); });
}

void RegisteredArray::copy_edges_out(std::byte* p, size_t nbytes) const {
  for_edges(p, nbytes,
            [this](ptrdiff_t at, size_t size) { std::memcpy(data_ + at, heap_at_ + at, size); });
}

const RegisteredArray& RegisteredArrays::add(SharedHeap& heap, std::byte* data, size_t nbytes,
                                             std::shared_ptr<void> keep_alive) {
  const std::lock_guard lock(mutex_);
  // Only the last array that starts at or before the new one's last byte can contain it. If any
  // array overlaps it, this one does.
  const auto found = entries_.lower_bound(data + std::max<size_t>(nbytes, 1) - 1);
  if (found != entries_.end()) {
    RegisteredArray& array = *found->second.array;
    if (array.contains(data, nbytes)) {
      ++found->second.num_adds;
      return array;
    }
    if (data < array.data() + array.nbytes()) {
      throw UsageError(
          "x overlaps an array that is already registered: unregister that array first");
    }
  }
  const auto added = entries_.emplace(
      data, Entry{std::make_unique<RegisteredArray>(heap, data, nbytes), std::move(keep_alive)});
  size_ = static_cast<int>(entries_.size());
  return *added.first->second.array;
}

void RegisteredArrays::forget(std::byte* data) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(data);
    if (found != entries_.end() && found->second.num_adds == 1) {
      found->second.array->drop_content();
    }
  }
  remove(data);
}

bool RegisteredArrays::remove(std::byte* data) {
  Entry gone;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.lower_bound(data);
    if (found == entries_.end() || !found->second.array->contains(data, 0)) return false;
    if (--found->second.num_adds != 0) return true;
    gone = std::move(found->second);
    entries_.erase(found);
    size_ = static_cast<int>(entries_.size());
    gone.array.reset();
  }
  return true;
}

bool RegisteredArrays::withdraw(const std::byte* p) {
  Entry gone;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  const auto found = entries_.lower_bound(const_cast<std::byte*>(p));
  if (found == entries_.end() || !found->second.array->contains(p, 0)) return true;
  gone = std::move(found->second);
  entries_.erase(found);
  size_ = static_cast<int>(entries_.size());
  return gone.array->withdraw();
}

const RegisteredArray* RegisteredArrays::find(const void* p, size_t nbytes) const {
  if (size_ == 0) return nullptr;
  const auto* bytes = static_cast<const std::byte*>(p);
  const std::lock_guard lock(mutex_);
  const auto found = entries_.lower_bound(const_cast<std::byte*>(bytes));
  if (found == entries_.end() || !found->second.array->contains(bytes, nbytes)) return nullptr;
  return found->second.array.get();
}

}  // namespace pycoll
