// The messages between a TcpStore and its server.
//
// A frame is a uint32 length and that many bytes: kind, request number, payload. The first frame of
// a client is its hello; the server reads no other frame before it accepts the hello. Every request
// gets one reply with its number, so that a client recognizes a late reply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bootstrap/join/serialize.h"

namespace pycoll {

enum class StoreFrame : uint8_t {
  kHello,    // text magic, text token, int32 rank
  kSet,      // text key, text value
  kGet,      // text key
  kAdd,      // text key, int64 delta
  kOk,       // text result
  kError,    // text error: the request was invalid
  kRefused,  // reply to a hello with another token
  kTaken,    // reply to a hello of a rank that has already joined this session
};

inline constexpr std::string_view kStoreMagic = "pycoll store 1";
inline constexpr size_t kMaxFrameBytes = 16 << 20;
/// Bytes that the server buffers for an unauthenticated peer.
inline constexpr size_t kMaxHelloBytes = 4096;

inline std::string store_frame(StoreFrame kind, uint32_t number, const WireWriter& payload) {
  WireWriter frame;
  frame.number(static_cast<uint32_t>(sizeof(kind) + sizeof(number) + payload.bytes().size()));
  frame.number(static_cast<uint8_t>(kind)).number(number);
  return frame.bytes() + payload.bytes();
}

/// Removes the first frame from `buffer` and returns it without its length; nothing while the frame
/// is incomplete.
inline std::optional<std::string> take_frame(std::string& buffer, size_t max_bytes) {
  uint32_t nbytes;
  if (buffer.size() < sizeof(nbytes)) return std::nullopt;
  nbytes = WireReader(buffer).number<uint32_t>();
  if (nbytes > max_bytes) throw MalformedMessage();
  if (buffer.size() - sizeof(nbytes) < nbytes) return std::nullopt;
  std::string frame = buffer.substr(sizeof(nbytes), nbytes);
  buffer.erase(0, sizeof(nbytes) + nbytes);
  return frame;
}

}  // namespace pycoll
