#include "transport/memory/process_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/environment.h"

namespace pycoll {
namespace {

// The kernel pins pages in small batches anyway; limiting a call lets a killed or interrupted rank
// end soon.
constexpr size_t kMaxBytes = size_t{64} << 20;

}  // namespace

bool process_memory_enabled() { return env_flag("PYCOLL_PEER_MEMORY"); }

bool read_process(pid_t pid, uint64_t address, void* to, size_t nbytes) {
  auto* at = static_cast<char*>(to);
  while (nbytes != 0) {
    const size_t wanted = std::min(nbytes, kMaxBytes);
    const iovec here{at, wanted};
    const iovec there{reinterpret_cast<void*>(address), wanted};
    const ssize_t done = ::process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (done <= 0) {
      if (done < 0 && errno == EINTR) continue;
      if (done == 0) errno = EFAULT;
      return false;
    }
    at += done;
    address += static_cast<uint64_t>(done);
    nbytes -= static_cast<size_t>(done);
  }
  return true;
}

}  // namespace pycoll
