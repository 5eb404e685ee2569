// Text of other processes in error messages: it must not control the reader's terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pycoll {

/// Bytes of a value that an error message shows.
inline constexpr size_t kShownBytes = 80;

/// `text` with everything except printable ASCII as \xNN, cut after `max_bytes`.
inline std::string printable(std::string_view text, size_t max_bytes = 1024) {
  std::string shown;
  for (const char one : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(one);
    if (byte >= 0x20 && byte < 0x7f) {
      shown += one;
      continue;
    }
    shown += "\\x";
    shown += "0123456789abcdef"[byte >> 4];
    shown += "0123456789abcdef"[byte & 15];
  }
  return text.size() > max_bytes ? shown + "..." : shown;
}

}  // namespace pycoll
