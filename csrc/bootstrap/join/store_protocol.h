// The messages between a TcpStore and its server.
//
// A frame is a uint32 length and that many bytes: kind, request number, payload. A connection
// begins with the challenge of bootstrap/security/challenge.h, in which rank 0 is the acceptor:
//
//   client -> server: kHello      server -> client: kChallenge
//   client -> server: kProof      server -> client: kOk with its own proof, kRefused or kTaken
//
// The server reads no request before it has accepted the proof. Every request gets one reply with
// its number, so that a client recognizes a late reply. Without a secret, the store is an abstract
// Unix socket, and both ends accept only processes of their own user.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/socket.h"
#include "bootstrap/join/serialize.h"
#include "bootstrap/security/sha256.h"
#include "bootstrap/security/token.h"

namespace pycoll {

enum class StoreFrame : uint8_t {
  kHello,      // text magic, int32 rank, text number
  kSet,        // text key, text value
  kGet,        // text key
  kAdd,        // text key, int64 delta
  kOk,         // text result
  kError,      // text error: the request was invalid, or the store has no room for it
  kRefused,    // reply to a proof with another token
  kTaken,      // reply to the proof of a rank that has already joined: text address of that process
  kChallenge,  // reply to a hello: text number
  kProof,      // text proof
  kLeave,      // the client is about to disconnect; no reply
  kGone,       // a rank has disconnected without kLeave: text error, int32 rank
  kFailed,     // no reply: the server's thread has failed: text error
  kDied,       // text error, int32 rank: the client knows that this rank has ended
};

inline constexpr std::string_view kStoreMagic = "pycoll store 2";
/// Key of the server's report of ranks that two processes have claimed; empty if there are none.
inline constexpr const char* kSecondClaimsKey = "store/second_claims";
inline constexpr size_t kMaxFrameBytes = 16 << 20;
/// Memory of the server: keys, values, and what it has received in part or not sent yet.
inline constexpr size_t kMaxStoreBytes = 512 << 20;
/// Ranks and newcomers that may join one session.
inline constexpr size_t kMaxStoreClients = 1024;
/// Bytes that the server buffers for an unauthenticated peer.
inline constexpr size_t kMaxHelloBytes = 4096;

/// Key for the proofs of a store's connections.
inline std::string store_key(std::string_view token) {
  const Digest key = hmac_sha256(token, "pycoll store");
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

/// Name of the abstract Unix socket of a store without a secret.
inline std::string store_socket_name(int port) { return "pycoll-store-" + std::to_string(port); }

/// Raises UsageError if other hosts could reach a store without a secret at this address.
inline void check_store_address(const std::string& address, int port) {
  for (const SocketAddress& one : resolve_tcp(address, port)) {
    if (one.is_loopback()) continue;
    throw UsageError("the ranks meet at " + join_host_port(address, port) +
                     ", which is not a loopback address, and PYCOLL_TOKEN is not set, so every "
                     "process that reaches this address could join: " +
                     how_to_set_token());
  }
}

/// Sends small messages at once, and notices within a minute that the other host is gone.
inline void set_store_options(int socket) {
  const int on = 1;
  const int idle_s = 10;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
}

inline std::optional<int64_t> parse_decimal(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped_at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped_at != end) return std::nullopt;
  return value;
}

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
