// A memory mapping with a single owner, and the way out of shared memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace pycoll {

/// Replaces whole pages by private ones with the same content, at the same address. False if the
/// system has no memory for them; nothing has changed then.
inline bool become_private(std::byte* pages, size_t nbytes) {
  void* own = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) return false;
  ::madvise(own, nbytes, MADV_HUGEPAGE);
  std::memcpy(own, pages, nbytes);
  if (::mremap(own, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, pages) != MAP_FAILED)
    return true;
  ::munmap(own, nbytes);
  return false;
}

class Mapping {
 public:
  Mapping() = default;
  /// Maps `bytes` of `fd` shared, or anonymous memory when fd is -1. Raises SystemError.
  Mapping(int fd, size_t bytes, int protection = PROT_READ | PROT_WRITE) : bytes_(bytes) {
    const int flags =
        fd < 0 ? MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED | MAP_NORESERVE;
    void* base = ::mmap(nullptr, bytes, protection, flags, fd, 0);
    if (base == MAP_FAILED) throw_system_error("mmap of a communicator's shared memory");
    base_ = static_cast<std::byte*>(base);
  }
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }

  std::byte* base() const { return base_; }

  /// Frees the memory but keeps its address range, which then has private zeros, so that a late
  /// read is harmless. False if the system refuses; nothing has changed then.
  bool release() {
    if (base_ == nullptr) return true;
    return ::mmap(base_, bytes_, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
  }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace pycoll
