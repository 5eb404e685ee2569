// The byte format of bootstrap messages: little-endian numbers, and strings preceded by their
// length. A reader checks everything: input that does not fit raises MalformedMessage.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace pycoll {

static_assert(std::endian::native == std::endian::little, "numbers are sent in host byte order");

class MalformedMessage : public Error {
 public:
  MalformedMessage() : Error("malformed bootstrap message") {}
};

class WireWriter {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  WireWriter& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  WireWriter& text(std::string_view value) {
    number(static_cast<uint32_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
    requires std::is_arithmetic_v<T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string_view text() { return take(number<uint32_t>()); }
  void expect_end() const {
    if (!rest_.empty()) throw MalformedMessage();
  }

 private:
  std::string_view take(size_t nbytes) {
    if (nbytes > rest_.size()) throw MalformedMessage();
    const std::string_view taken = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return taken;
  }
  std::string_view rest_;
};

}  // namespace pycoll
