// The server behind every TcpStore of a session: one thread inside rank 0's process.
//
// It listens only on the given address. A connection must begin with a hello that carries the
// session token, after a TLS handshake with PYCOLL_TLS=1. The server closes a connection that sends
// anything else, or nothing for kHelloSeconds, and keeps nothing of it. Each rank may join a
// session once, so that a rank which already starts the next session cannot join the old one.
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

  /// Refuses new clients, serves the connected ones until all have left or `linger_s` has passed,
  /// then disconnects the rest (their calls raise PeerDiedError) and ends the thread. With
  /// `linger_s` 0 it does not wait for clients. A second call does nothing.
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

  // Used by the thread only.
  int64_t accept_after_ns_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::string, std::string> values_;
  std::set<int> joined_ranks_;
};

}  // namespace pycoll
