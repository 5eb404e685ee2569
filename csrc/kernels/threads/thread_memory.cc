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

constexpr size_t kPageBytes = 2 << 20;

/// A DeviceHandle's bytes of kind kIpc.
struct IpcHandle {
  pid_t process;
  int fd;
};

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

std::string told_failure(const std::string& function) {
  const std::string told = env_text("PYCOLL_DEVICE_THREADS_FAIL").value_or("");
  return told.starts_with(function + ":") ? told.substr(function.size() + 1) : "";
}

void* ThreadMemory::allocate(int device, size_t nbytes) {
  const std::string error = told_failure("export");
  if (!error.empty()) {
    const std::lock_guard lock(mutex_);
    refused_ = error;
  }
  const size_t rounded = (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  return map(device, rounded, create_file(rounded), error.empty());
}

std::string ThreadMemory::note() {
  const std::lock_guard lock(mutex_);
  return refused_.empty() ? "" : "shared by IPC handles, because of " + refused_;
}

void* ThreadMemory::map(int device, size_t nbytes, Fd fd, bool by_descriptor) {
  void* memory = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw_system_error("mmap");
  const std::lock_guard lock(mutex_);
  allocations_.emplace(static_cast<const std::byte*>(memory),
                       Allocation{device, nbytes, std::move(fd), by_descriptor});
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
  if (!found->second.by_descriptor) {
    const IpcHandle ipc{::getpid(), found->second.fd.get()};
    handle->kind = DeviceHandleKind::kIpc;
    std::memcpy(handle->bytes, &ipc, sizeof(ipc));
    return;
  }
  *fd = ::fcntl(found->second.fd.get(), F_DUPFD_CLOEXEC, 0);
  if (*fd < 0) throw_system_error("dup");
  handle->kind = DeviceHandleKind::kFd;
}

void* ThreadMemory::import_memory(int device, const DeviceHandle& handle, int fd) {
  if (handle.kind == DeviceHandleKind::kIpc) {
    IpcHandle ipc{};
    std::memcpy(&ipc, handle.bytes, sizeof(ipc));
    const std::string path =
        "/proc/" + std::to_string(ipc.process) + "/fd/" + std::to_string(ipc.fd);
    Fd theirs(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (!theirs) throw_system_error("opening " + path);
    return map(device, handle.nbytes, std::move(theirs), false);
  }
  if (handle.kind != DeviceHandleKind::kFd) throw UsageError("this memory cannot be imported");
  Fd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!own) throw_system_error("dup");
  return map(device, handle.nbytes, std::move(own), true);
}

bool ThreadMemory::withdraw(const void* p) {
  const std::lock_guard lock(mutex_);
  const auto found = find(p);
  if (found == allocations_.end() || !found->second.by_descriptor) return false;
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
