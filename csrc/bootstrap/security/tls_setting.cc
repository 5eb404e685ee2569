#include "bootstrap/security/tls_setting.h"

#include <cstdlib>
#include <string_view>

#include "base/environment.h"
#include "base/error.h"
#include "bootstrap/security/sha256.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr size_t kMinSecretBytes = 16;

}  // namespace

bool tls_is_on() { return env_flag(kTlsVariable); }

std::string required_secret() {
  const std::string secret = env_text("PYCOLL_TOKEN").value_or("");
  if (secret.size() >= kMinSecretBytes) return secret;
  throw UsageError(
      std::string(kTlsVariable) +
      "=1 needs a secret that all ranks share and that cannot be guessed, but "
      "PYCOLL_TOKEN " +
      (secret.empty() ? "is not set" : "has " + std::to_string(secret.size()) + " characters") +
      ": set it to at least " + std::to_string(kMinSecretBytes) +
      " random characters, such as the output of `openssl rand -hex 16` (pycoll run "
      "does this itself)");
}

std::string seal_token(const std::string& secret, const std::string& token) {
  const Digest sealed = hmac_sha256(secret, "pycoll token " + token);
  return to_hex({reinterpret_cast<const char*>(sealed.data()), sealed.size()});
}

std::string sealed_token(const std::string& token) {
  return tls_is_on() ? seal_token(required_secret(), token) : token;
}

}  // namespace pycoll
