// SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), which prove knowledge of a secret without
// sending it. For a few hundred bytes per connection; not optimized for speed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace pycoll {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view message);

}  // namespace pycoll
