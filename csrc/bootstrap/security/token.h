// The session token: a process that knows it belongs to the session. It keeps out other jobs and
// unrelated connections. Without TLS (bootstrap/security/tls_setting.h) it travels unencrypted and does not
// protect against eavesdroppers on the network.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycoll {

inline constexpr size_t kMaxTokenBytes = 1024;
/// Limit of connections that have not sent the token yet; beyond it, the oldest is closed.
inline constexpr size_t kMaxUnauthenticated = 128;

/// Raises UsageError for a token that is too long for a hello.
void check_token(std::string_view token);

/// Compares in a time that does not depend on where the two differ.
bool same_token(std::string_view own, std::string_view offered);

/// Two hexadecimal digits for each byte.
std::string to_hex(std::string_view bytes);

/// 128 random bits as 32 hexadecimal digits.
std::string random_hex();

}  // namespace pycoll
