// Memory of a device with a mirror in CPU memory, at a constant distance: the host fills in the
// mirror, uploads it, launches, and downloads it. It works where the host cannot reach a device's
// memory, as on a GPU, and in the same way on the emulated device.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory_resource>
#include <new>

#include "device/device.h"

namespace pycoll {

class DeviceArena : public std::pmr::memory_resource {
 public:
  DeviceArena(const Device& device, size_t nbytes)
      : device_(device), memory_(device, nbytes), mirror_(device, nbytes), nbytes_(nbytes) {}

  const Device& device() const { return device_; }
  /// Bytes from a place of the mirror to where kernels see it.
  ptrdiff_t shift() const {
    return static_cast<ptrdiff_t>(reinterpret_cast<uintptr_t>(memory_.data()) -
                                  reinterpret_cast<uintptr_t>(mirror_.data()));
  }
  template <class T>
  T* seen_by_kernels(T* p) const {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(shift()));
  }
  /// Copies what is allocated, and waits for that.
  void upload(DeviceStream stream) const { copy(memory_.data(), mirror_.data(), stream); }
  void download(DeviceStream stream) const { copy(mirror_.data(), memory_.data(), stream); }
  /// Forgets all allocations; their owners must be gone.
  void reset() { used_ = 0; }

 private:
  void copy(std::byte* to, const std::byte* from, DeviceStream stream) const {
    if (used_ != 0) device_.copy(to, from, used_, stream);
    device_.synchronize(stream);
  }
  void* do_allocate(size_t nbytes, size_t alignment) override {
    // Bytes, too, begin where arrays of a device do: kernels have loops for aligned operands.
    alignment = std::max<size_t>(alignment, 256);
    const size_t at = (used_ + alignment - 1) / alignment * alignment;
    if (at > nbytes_ || nbytes > nbytes_ - at) throw std::bad_alloc();
    used_ = at + nbytes;
    return mirror_.data() + at;
  }
  void do_deallocate(void*, size_t, size_t) override {}
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  Device device_;
  DeviceMemory memory_;
  PinnedMemory mirror_;
  size_t nbytes_;
  size_t used_ = 0;
};

}  // namespace pycoll
