#include "transport/peer_memory.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstring>

#include "transport/process_memory.h"

namespace pycoll {

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
  if (!process_memory_enabled()) return Reach::kRefused;
  const PeerMemoryAddress& theirs = addresses_[peer];
  uint64_t token = 0;
  if (!read_process(static_cast<pid_t>(theirs.pid), theirs.token_address, &token, sizeof(token)))
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
  return reach == Reach::kAllowed &&
         read_process(static_cast<pid_t>(addresses_[peer].pid), address, dst, nbytes);
}

}  // namespace pycoll
