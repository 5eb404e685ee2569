// One client of the store's server: what it has sent, what it waits for, and what it has not read.
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bootstrap/join/store_protocol.h"
#include "bootstrap/security/challenge.h"
#include "bootstrap/security/channel.h"

namespace pycoll {

struct StoreConnection {
  struct Wait {
    std::string key;
    uint32_t number;
  };

  Channel channel;
  std::string where;  // the address of the client
  pid_t pid = 0;      // of a client that is a process of this user
  int rank = -1;      // what it says, until it is welcome
  std::optional<Challenge> challenge;
  int64_t hello_by_ns = 0;
  bool welcome = false;
  bool left = false;     // it has said that it disconnects
  bool closing = false;  // close once `out` is sent
  std::string in;
  std::string out;
  std::optional<Wait> wait;  // the last get, until it is answered

  void reply(StoreFrame kind, uint32_t number, std::string_view text) {
    out += store_frame(kind, number, WireWriter().text(text));
  }
  /// Memory of what is buffered.
  size_t buffered_bytes() const { return in.size() + out.size() + (wait ? wait->key.size() : 0); }
  /// Sends what the socket accepts; true once all is sent, unless that closes the connection.
  bool flush() {
    while (!out.empty()) {
      const ssize_t sent = channel.send(out);
      if (sent > 0) {
        out.erase(0, static_cast<size_t>(sent));
      } else if (errno != EINTR) {
        if (errno != EAGAIN) channel.reset();
        return false;
      }
    }
    if (closing) channel.reset();
    return static_cast<bool>(channel);
  }
  /// Reads what the socket and TLS have ready; drops a client that has left.
  void fill() {
    const Tls::Greeting greeting = channel.greet();
    if (greeting == Tls::Greeting::kFailed) channel.reset();
    if (greeting != Tls::Greeting::kDone) return;
    do {
      char buffer[65536];
      const ssize_t received = channel.receive(buffer, sizeof(buffer));
      if (received > 0) {
        in.append(buffer, static_cast<size_t>(received));
      } else if (received == 0 || (errno != EAGAIN && errno != EINTR)) {
        channel.reset();
      }
    } while (channel && channel.may_have_more());
  }
};

}  // namespace pycoll
