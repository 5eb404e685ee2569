#include "kernels/threads/thread_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "base/environment.h"
#include "base/error.h"

namespace pycoll {
namespace {

/// Lets tests cover the path without exports.
bool may_export() { return env_flag("PYCOLL_DEVICE_THREADS_EXPORT"); }

Fd create_file(size_t nbytes) {
  Fd fd(::memfd_create("pycoll-device", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) {
    throw_system_error("memfd_create");
  }
  return fd;
}

}  // namespace

void* ThreadMemory::allocate(int device, size_t nbytes) {
  return map(device, nbytes, create_file(nbytes));
}

void* ThreadMemory::map(int device, size_t nbytes, Fd fd) {
  void* memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw_system_error("mmap");
  const std::lock_guard lock(mutex_);
  allocations_.emplace(static_cast<const std::byte*>(memory),
                       Allocation{device, nbytes, std::move(fd)});
  return memory;
}

void ThreadMemory::free(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(static_cast<const std::byte*>(memory));
  if (found == allocations_.end()) throw UsageError("free: no allocation at this address");
  ::munmap(memory, found->second.nbytes);
  allocations_.erase(found);
}

ThreadMemory::Allocations::iterator ThreadMemory::find(const void* p) {
  const auto* at = static_cast<const std::byte*>(p);
  auto found = allocations_.upper_bound(at);
  if (found == allocations_.begin()) return allocations_.end();
  --found;
  return at < found->first + found->second.nbytes ? found : allocations_.end();
}

int ThreadMemory::device_of(const void* p) {
  const std::lock_guard lock(mutex_);
  const auto found = find(p);
  return found == allocations_.end() ? -1 : found->second.device;
}

void ThreadMemory::export_memory(const void* p, DeviceHandle* handle, int32_t* fd) {
  const std::lock_guard lock(mutex_);
  const auto found = find(p);
  if (found == allocations_.end()) throw UsageError("export: no memory of a device");
  *handle = {};
  *fd = -1;
  handle->nbytes = found->second.nbytes;
  handle->offset = static_cast<uint64_t>(static_cast<const std::byte*>(p) - found->first);
  if (!may_export()) return;
  *fd = ::fcntl(found->second.fd.get(), F_DUPFD_CLOEXEC, 0);
  if (*fd < 0) throw_system_error("dup");
  handle->kind = DeviceHandleKind::kFd;
}

void* ThreadMemory::import_memory(int device, const DeviceHandle& handle, int fd) {
  if (handle.kind != DeviceHandleKind::kFd) throw UsageError("this memory cannot be imported");
  Fd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) throw_system_error("dup");
  return map(device, handle.nbytes, std::move(own));
}

bool ThreadMemory::withdraw(const void* p) {
  const std::lock_guard lock(mutex_);
  const auto found = find(p);
  if (found == allocations_.end()) return false;
  auto* const memory = const_cast<std::byte*>(found->first);
  const size_t nbytes = found->second.nbytes;
  Fd own = create_file(nbytes);
  for (size_t at = 0; at < nbytes;) {
    const ssize_t written = ::pwrite(own.get(), memory + at, nbytes - at, static_cast<off_t>(at));
    if (written < 0) throw_system_error("pwrite");
    at += static_cast<size_t>(written);
  }
  if (::mmap(memory, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, own.get(), 0) ==
      MAP_FAILED) {
    throw_system_error("mmap");
  }
  found->second.fd = std::move(own);
  return true;
}

}  // namespace pycoll
