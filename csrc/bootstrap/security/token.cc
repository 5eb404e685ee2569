#include "bootstrap/security/token.h"

#include <sys/random.h>

#include "base/environment.h"
#include "base/error.h"
#include "bootstrap/security/tls_setting.h"

namespace pycoll {

Token read_token(const std::string& otherwise) {
  if (tls_is_on()) return {required_secret(), Trust::kSecret};
  const std::string text = env_text("PYCOLL_TOKEN").value_or("");
  if (text.empty()) return {otherwise, Trust::kSameUser};
  if (text == "none") return {otherwise, Trust::kAnyone};
  return {text, Trust::kSecret};
}

std::string how_to_set_token() {
  return "set PYCOLL_TOKEN to the same random text on all ranks, such as the output of `openssl "
         "rand -hex 16`; PYCOLL_TOKEN=none lets every process that reaches the ports join";
}

void check_token(std::string_view token) {
  if (token.size() <= kMaxTokenBytes) return;
  throw UsageError("the session token (PYCOLL_TOKEN) has " + std::to_string(token.size()) +
                   " bytes; the maximum is " + std::to_string(kMaxTokenBytes));
}

bool same_token(std::string_view own, std::string_view offered) {
  // volatile: the compiler must not stop at the first difference.
  volatile unsigned char difference = own.size() == offered.size() ? 0 : 1;
  for (size_t i = 0; i < offered.size(); ++i) {
    const char expected = i < own.size() ? own[i] : '\0';
    difference = difference | static_cast<unsigned char>(expected ^ offered[i]);
  }
  return difference == 0;
}

std::string to_hex(std::string_view bytes) {
  std::string hex;
  for (const char one : bytes) {
    const auto byte = static_cast<unsigned char>(one);
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

std::string random_bytes(size_t nbytes) {
  std::string bytes(nbytes, '\0');
  if (::getrandom(bytes.data(), nbytes, 0) != static_cast<ssize_t>(nbytes)) {
    throw_system_error("getrandom");
  }
  return bytes;
}

std::string random_hex() { return to_hex(random_bytes(16)); }

}  // namespace pycoll
