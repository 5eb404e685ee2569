// Memory for messages, which the ranks of a host reach without a copy.
#pragma once

#include <cstddef>
#include <memory>

#include "transport/transport.h"

namespace pycoll {

/// One owner of zeroed memory. Outlives the communicator that it was made for.
class SharedMemory {
 public:
  /// From the shared heap of the transport; plain memory where ranks are threads, or where there is
  /// no heap. Raises SystemError when there is no memory left.
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
  std::unique_ptr<std::byte, Unmap> own_;  // where there is no heap
  std::byte* data_ = nullptr;
  size_t nbytes_ = 0;
};

}  // namespace pycoll
