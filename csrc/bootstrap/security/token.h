// The session token: who knows it belongs to the session. It keeps other jobs and passers-by out.
// Without TLS (bootstrap/security/tls_setting.h) it travels unencrypted, and is no defence against
// someone who reads the network's traffic.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycoll {

inline constexpr size_t kMaxTokenBytes = 1024;
/// Connections that have not said the token yet; one more, and the oldest of them is closed.
inline constexpr size_t kMaxStrangers = 128;

/// Raises UsageError for a token that no hello could carry.
void check_token(std::string_view token);

/// Compares in a time that does not tell where the two differ.
bool same_token(std::string_view own, std::string_view offered);

/// Two hexadecimal digits for each byte.
std::string to_hex(std::string_view bytes);

/// 128 random bits as 32 hexadecimal digits.
std::string random_hex();

}  // namespace pycoll
