// The proof by which both ends of a connection show that they know a key, without sending it.
//
// Each end sends a fresh random number. The proof is an HMAC over both numbers, both ranks and the
// prover's role, so that a recorded or reflected proof fits no other connection. The acceptor sends
// its proof only after the connector's. With a key that can be guessed, a proof allows guessing.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "bootstrap/join/serialize.h"
#include "bootstrap/security/sha256.h"

namespace pycoll {

inline constexpr size_t kChallengeBytes = 16;
inline constexpr size_t kProofBytes = 32;

struct Challenge {
  int connector = 0;  // rank of the end that opened the connection
  int acceptor = 0;
  std::string connector_number;
  std::string acceptor_number;

  /// `role`: "connect" or "accept".
  std::string proof(std::string_view key, std::string_view role) const {
    WireWriter said;
    said.text(role).number(static_cast<int32_t>(connector)).number(static_cast<int32_t>(acceptor));
    said.text(connector_number).text(acceptor_number);
    const Digest digest = hmac_sha256(key, said.bytes());
    return {reinterpret_cast<const char*>(digest.data()), digest.size()};
  }
};

}  // namespace pycoll
