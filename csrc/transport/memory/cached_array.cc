#include "transport/memory/cached_array.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>

#include "base/error.h"

namespace pycoll {
namespace {

// Each array splits a mapping of this process in three, and the system allows about 65,000.
constexpr size_t kMaxArrays = 4096;
// Limit over all arrays, because a fork copies their bytes.
constexpr size_t kMaxCachedBytes = size_t{512} << 20;

/// Whether a driver is loaded that may access an array's pages directly, at their old place.
bool pages_may_be_pinned() {
  for (const char* driver : {"libcuda.so.1", "libibverbs.so.1"}) {
    if (void* library = ::dlopen(driver, RTLD_LAZY | RTLD_NOLOAD)) {
      ::dlclose(library);
      return true;
    }
  }
  return false;
}

}  // namespace

/// All cached arrays of this process. Fork handlers are called without a context, so there is one
/// guard per process, which is never destroyed.
class ForkGuard {
 public:
  static ForkGuard& of_this_process() {
    static ForkGuard& guard = *new ForkGuard;
    return guard;
  }

  std::mutex& mutex() { return mutex_; }
  void add(CachedArray* array) {
    arrays_.insert(array);
    num_bytes_ += array->nbytes_;
  }
  void remove(CachedArray* array) {
    arrays_.erase(array);
    num_bytes_ -= array->nbytes_;
  }
  bool has_room_for(size_t nbytes) const {
    return arrays_.size() < kMaxArrays && num_bytes_ + nbytes <= kMaxCachedBytes;
  }

 private:
  ForkGuard() { ::pthread_atfork(before_fork, in_parent, in_child); }

  /// Copies the pages on the forking thread, so that the child finds everything this thread wrote.
  static void before_fork() {
    ForkGuard& guard = of_this_process();
    guard.mutex_.lock();
    for (CachedArray* array : guard.arrays_) {
      void* copy = ::mmap(nullptr, array->pages_bytes_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      array->copy_ = copy == MAP_FAILED ? nullptr : copy;
      if (array->copy_ != nullptr) std::memcpy(copy, array->pages_, array->pages_bytes_);
    }
  }

  static void in_parent() {
    ForkGuard& guard = of_this_process();
    for (CachedArray* array : guard.arrays_) {
      if (array->copy_ != nullptr) ::munmap(array->copy_, array->pages_bytes_);
      array->copy_ = nullptr;
    }
    guard.mutex_.unlock();
  }

  static void in_child() {
    ForkGuard& guard = of_this_process();
    for (CachedArray* array : guard.arrays_) {
      if (array->copy_ == nullptr) continue;  // without memory for a copy, the pages stay shared
      ::mremap(array->copy_, array->pages_bytes_, array->pages_bytes_,
               MREMAP_MAYMOVE | MREMAP_FIXED, array->pages_);
    }
    guard.arrays_.clear();
    guard.num_bytes_ = 0;
    guard.mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<CachedArray*> arrays_;
  size_t num_bytes_ = 0;
};

void CachedArray::attach(const std::shared_ptr<SharedHeap>& heap) {
  if (pages_may_be_pinned()) return;
  ForkGuard& guard = ForkGuard::of_this_process();
  const std::lock_guard lock(guard.mutex());
  if (ended_ || heap_ != nullptr || !guard.has_room_for(nbytes_) ||
      heap->contains(data_, nbytes_) || heap->registered().find(data_, nbytes_) != nullptr) {
    return;
  }
  try {
    const RegisteredArray& array = heap->registered().add(*heap, data_, nbytes_, nullptr);
    pages_ = array.pages();
    pages_bytes_ = array.pages_bytes();
  } catch (const Error&) {
    return;  // not private memory, or no room in the heap: slots are used instead
  }
  heap_ = heap;
  pid_ = ::getpid();
  guard.add(this);
}

void CachedArray::end(Content content) {
  // Take no lock in a forked process: a thread of the parent may have held it.
  if (heap_ != nullptr && ::getpid() != pid_) return;
  ForkGuard& guard = ForkGuard::of_this_process();
  const std::lock_guard lock(guard.mutex());
  ended_ = true;
  if (heap_ == nullptr) return;
  guard.remove(this);
  if (content == Content::kStays) {
    heap_->registered().remove(data_);
  } else {
    heap_->registered().forget(data_);
  }
  heap_.reset();
}

}  // namespace pycoll
