// Memory for arrays that the ranks of a host access without a copy.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/transport.h"

namespace pycoll {

/// Owner of zeroed memory. May outlive the communicator that allocated it.
class SharedMemory {
 public:
  /// Allocates from the transport's shared heap; plain memory if ranks are threads or there is no
  /// heap. Raises SystemError if the memory is exhausted.
  SharedMemory(Transport& transport, size_t nbytes);
  SharedMemory(SharedMemory&&) = default;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  struct Unmap {
    size_t nbytes;
    void operator()(std::byte* memory) const;
  };

  std::shared_ptr<SharedHeap> heap_;
  std::unique_ptr<std::byte, Unmap> own_;  // without a heap
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace pycoll
