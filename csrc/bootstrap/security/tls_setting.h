// Whether TCP connections between ranks are encrypted, and the secret for it.
#pragma once

#include <string>

namespace pycoll {

/// 1: encrypt; 0 or unset: do not. Must be identical on all ranks.
inline constexpr const char* kTlsVariable = "PYCOLL_TLS";

/// Raises UsageError for any other value of the variable.
bool tls_is_on();

/// The launcher's secret, PYCOLL_TOKEN, for TLS. Raises UsageError if it is missing or too short: a
/// recorded handshake allows offline guessing.
std::string required_secret();

/// Derives, from a token that other programs may have read, a token that requires `secret` too.
std::string seal_token(const std::string& secret, const std::string& token);

/// With TLS, seal_token() with the launcher's secret; without TLS, the token itself.
std::string sealed_token(const std::string& token);

}  // namespace pycoll
