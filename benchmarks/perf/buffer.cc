#include "perf/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "device/device_library.h"

namespace pycoll::perf {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

/// In huge pages where the system gives them on request, as NumPy asks for large arrays.
std::shared_ptr<std::byte> pages(size_t nbytes) {
  const size_t rounded = (std::max<size_t>(nbytes, 1) + kHugePage - 1) / kHugePage * kHugePage;
  void* const memory = std::aligned_alloc(kHugePage, rounded);
  if (memory == nullptr) throw SystemError("no memory for a message");
  madvise(memory, rounded, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(memory), std::free};
}

}  // namespace

Buffer::Buffer(Communicator& comm, const Options& options, size_t nbytes, bool registered)
    : nbytes_(nbytes) {
  const int device = device_of(options, comm.rank());
  if (registered && device < 0) {
    const auto shared = std::make_shared<SharedMemory>(comm.allocate(nbytes));
    memory_ = {shared, shared->data()};
  } else {
    memory_ = pages(nbytes);
  }
  data_ = host_ = memory_.get();
  std::memset(host_, 0, nbytes);  // touched
  if (device < 0) return;
  on_device_ = registered ? comm.allocate_on_device(device, nbytes)
                          : std::make_shared<DeviceMemory>(Device(device_table(), device), nbytes);
  data_ = on_device_->data();
}

void Buffer::push() const {
  if (on_device_ == nullptr) return;
  on_device_->device().copy(data_, host_, nbytes_, nullptr);
  on_device_->device().synchronize(nullptr);
}

void Buffer::pull() const {
  if (on_device_ == nullptr) return;
  on_device_->device().copy(host_, data_, nbytes_, nullptr);
  on_device_->device().synchronize(nullptr);
}

int device_of(const Options& options, int rank) {
  return options.num_devices == 0 ? -1 : rank % options.num_devices;
}

}  // namespace pycoll::perf
