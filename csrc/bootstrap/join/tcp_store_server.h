// The server behind every TcpStore of a session: one thread inside rank 0's process.
//
// It listens only on the address it is given. A connection must open with a hello that carries the
// session token, and with PYCOLL_TLS=1 with TLS's greeting before it; whoever sends anything else,
// or nothing for kHelloSeconds, is cut off and leaves no trace. Each rank may join a session once,
// so that a rank which already starts the next session cannot end up in the old one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace pycoll {

class TcpStoreServer {
 public:
  static constexpr double kHelloSeconds = 10;

  /// Listens on `address` (a name, IPv4 or IPv6; not 0.0.0.0 or ::); `port` 0 picks a free one.
  TcpStoreServer(const std::string& address, int port, std::string token);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const { return port_; }

  /// Takes no new clients, serves those there until all have left but for at most `linger_s`, then
  /// cuts off the rest (their calls raise PeerDiedError) and ends the thread. Without `linger_s`
  /// nobody is waited for. A second call does nothing.
  void stop(double linger_s = 0);

 private:
  struct Connection;

  void listen_on(const std::string& address, int port);
  void serve();
  void accept_all();
  void advance(Connection& connection);
  void handle_hello(Connection& connection, const std::string& frame);
  void handle_request(Connection& connection, const std::string& frame);
  void set_value(const std::string& key, std::string value);
  void drop_the_gone();
  int64_t poll_wait_ns() const;

  std::string token_;
  const bool encrypted_;
  int port_ = 0;
  Fd listener_;
  Fd wake_;
  std::atomic<int64_t> stop_at_ns_;
  std::thread thread_;

  // Touched by the thread only.
  int64_t accept_after_ns_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::string, std::string> values_;
  std::set<int> joined_ranks_;
};

}  // namespace pycoll
