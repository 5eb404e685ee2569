#include "bootstrap/security/token.h"

#include <sys/random.h>

#include "base/error.h"

namespace pycoll {

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

std::string random_hex() {
  char bytes[16];
  if (::getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) throw_system_error("getrandom");
  return to_hex({bytes, sizeof(bytes)});
}

}  // namespace pycoll
