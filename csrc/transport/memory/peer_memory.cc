#include "transport/memory/peer_memory.h"

#include <sys/random.h>

#include <cstring>

#include "transport/memory/process_memory.h"
#include "transport/transport.h"

namespace pycoll {

PeerMemory::PeerMemory(Transport& transport)
    : transport_(transport),
      addresses_(transport.segment().peer_memory_addresses()),
      reach_(static_cast<size_t>(transport.num_ranks())) {
  // In the reader's namespace, or after reuse, the pid may be another process, which might contain
  // a constant but not this random token.
  if (::getrandom(&token_, sizeof(token_), 0) != sizeof(token_)) {
    token_ = reinterpret_cast<uint64_t>(this);
  }
  transport.segment().peer_memory_addresses()[transport.rank()] = {
      reinterpret_cast<uint64_t>(&token_), token_};
}

PeerMemory::Reach PeerMemory::probe(int peer) const {
  const pid_t pid = transport_.pid(peer);
  if (!process_memory_enabled() || pid <= 0) return Reach::kRefused;
  const PeerMemoryAddress& theirs = addresses_[peer];
  uint64_t token = 0;
  if (!read_process(pid, theirs.token_address, &token, sizeof(token))) return Reach::kRefused;
  return token == theirs.token ? Reach::kAllowed : Reach::kRefused;
}

bool PeerMemory::reaches(int peer) {
  if (transport_.shares_address_space()) return true;
  std::atomic<Reach>& reach = reach_[static_cast<size_t>(peer)];
  Reach known = reach;
  if (known == Reach::kUnknown) {
    known = probe(peer);
    reach = known;
  }
  return known == Reach::kAllowed;
}

bool PeerMemory::read(int peer, void* dst, uint64_t address, size_t nbytes) {
  if (transport_.shares_address_space()) {
    std::memcpy(dst, reinterpret_cast<const void*>(address), nbytes);
    return true;
  }
  return reaches(peer) && read_process(transport_.pid(peer), address, dst, nbytes);
}

}  // namespace pycoll
