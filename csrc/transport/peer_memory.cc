#include "transport/peer_memory.h"

#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pycoll {
namespace {

// The kernel pins pages in small batches whatever is asked for; shorter calls let a killed or
// interrupted rank end.
constexpr size_t kMaxReadBytes = size_t{64} << 20;

bool read_process(uint64_t pid, void* dst, uint64_t address, size_t nbytes) {
  auto* to = static_cast<std::byte*>(dst);
  while (nbytes != 0) {
    const size_t wanted = std::min(nbytes, kMaxReadBytes);
    const iovec local{to, wanted};
    const iovec remote{reinterpret_cast<void*>(address), wanted};
    const ssize_t got = ::process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    to += got;
    address += static_cast<uint64_t>(got);
    nbytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

PeerMemory::PeerMemory(PeerMemoryAddress* addresses, int rank, int num_ranks, bool same_process)
    : addresses_(addresses),
      same_process_(same_process),
      reach_(static_cast<size_t>(num_ranks), same_process ? Reach::kAllowed : Reach::kUnknown) {
  // A pid may mean another process in the reader's namespace: the token tells.
  if (::getrandom(&token_, sizeof(token_), 0) != sizeof(token_)) {
    token_ = reinterpret_cast<uint64_t>(this);
  }
  addresses_[rank] = {static_cast<uint64_t>(::getpid()), reinterpret_cast<uint64_t>(&token_),
                      token_};
}

PeerMemory::Reach PeerMemory::probe(int peer) const {
  // For tests of the way around, and for systems where the call exists and is slow.
  const char* setting = std::getenv("PYCOLL_PEER_MEMORY");
  if (setting != nullptr && std::strcmp(setting, "0") == 0) return Reach::kRefused;
  const PeerMemoryAddress& theirs = addresses_[peer];
  uint64_t token = 0;
  if (!read_process(theirs.pid, &token, theirs.token_address, sizeof(token)))
    return Reach::kRefused;
  return token == theirs.token ? Reach::kAllowed : Reach::kRefused;
}

bool PeerMemory::read(int peer, void* dst, uint64_t address, size_t nbytes) {
  if (same_process_) {
    std::memcpy(dst, reinterpret_cast<const void*>(address), nbytes);
    return true;
  }
  Reach& reach = reach_[static_cast<size_t>(peer)];
  if (reach == Reach::kUnknown) reach = probe(peer);
  return reach == Reach::kAllowed && read_process(addresses_[peer].pid, dst, address, nbytes);
}

}  // namespace pycoll
