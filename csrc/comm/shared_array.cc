#include "comm/shared_array.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/error.h"

namespace pycoll {

SharedMemory::SharedMemory(Transport& transport, size_t nbytes)
    : heap_(transport.heap()), nbytes_(nbytes) {
  if (heap_ != nullptr) {
    data_ = heap_->allocate(nbytes);
    return;
  }
  const size_t mapped = std::max<size_t>(nbytes, 1);
  void* memory =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw_system_error("allocating " + std::to_string(nbytes) + " bytes");
  }
  ::madvise(memory, mapped, MADV_HUGEPAGE);
  own_ = {static_cast<std::byte*>(memory), Unmap{mapped}};
  data_ = own_.get();
}

SharedMemory::~SharedMemory() {
  if (heap_ != nullptr) heap_->free(data_);
}

void SharedMemory::Unmap::operator()(std::byte* memory) const { ::munmap(memory, nbytes); }

}  // namespace pycoll
