// The session token and what it is worth. A process that knows a secret token belongs to the
// session. The token itself is never sent: both ends of a connection prove that they know it
// (bootstrap/security/challenge.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pycoll {

inline constexpr size_t kMaxTokenBytes = 1024;
/// Limit of connections that have not proved that they know the token; beyond it, the oldest is
/// closed.
inline constexpr size_t kMaxUnauthenticated = 128;

/// What keeps processes that are not ranks out of a session.
enum class Trust : uint8_t {
  kSecret,    // a token that only the ranks know
  kSameUser,  // no secret: the ranks are on one host, and the kernel says that one user owns them
  kAnyone,    // PYCOLL_TOKEN=none: nothing
};

struct Token {
  std::string text;
  Trust trust = Trust::kSecret;
};

/// The token of this process: PYCOLL_TOKEN, or with PYCOLL_TOKEN=none or without it the public text
/// `otherwise`. Raises UsageError if PYCOLL_TLS=1 has no secret.
Token read_token(const std::string& otherwise);

/// What to do about a missing secret: the end of an error message.
std::string how_to_set_token();

/// Raises UsageError for a token that is too long.
void check_token(std::string_view token);

/// Compares in a time that does not depend on where the two differ.
bool same_token(std::string_view own, std::string_view offered);

/// Two hexadecimal digits for each byte.
std::string to_hex(std::string_view bytes);

/// `nbytes` random bytes of the system.
std::string random_bytes(size_t nbytes);

/// 128 random bits as 32 hexadecimal digits.
std::string random_hex();

}  // namespace pycoll
