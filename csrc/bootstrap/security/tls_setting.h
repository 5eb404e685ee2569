// Whether what ranks send over TCP is encrypted, and with whose secret.
#pragma once

#include <string>

namespace pycoll {

/// 1: encrypt; 0 or unset: do not. The same on all ranks.
inline constexpr const char* kTlsVariable = "PYCOLL_TLS";

/// Raises UsageError where the variable is neither.
bool tls_is_on();

/// The launcher's secret, PYCOLL_TOKEN, where TLS is on. Raises UsageError where nobody has set one
/// that cannot be guessed: who records a greeting may try guesses for as long as he likes.
std::string required_secret();

/// Of a token that has travelled by other ways than TLS: one that only those can make who know the
/// launcher's secret, too. Without TLS the token itself.
std::string sealed_token(const std::string& token);

}  // namespace pycoll
