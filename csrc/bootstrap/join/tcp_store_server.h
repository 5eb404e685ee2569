// The server behind every TcpStore of a session: one thread inside rank 0's process.
//
// It listens only on the given address. A connection must begin with a proof that the client knows
// the session token (store_protocol.h), after a TLS handshake with PYCOLL_TLS=1. The server closes
// a connection that sends anything else, or nothing for kHelloSeconds, and keeps nothing of it.
// Each rank may join a session once: a second claim is refused and reported, and the first is not
// disturbed. So a rank which already starts the next session cannot join the old one, either.
// Requests for which the server has no memory left (kMaxStoreBytes) are refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "base/thread.h"
#include "bootstrap/local/silent_processes.h"
#include "bootstrap/security/token.h"

namespace pycoll {

struct StoreConnection;

class TcpStoreServer {
 public:
  static constexpr double kHelloSeconds = 10;

  /// Listens on `address` (a name, IPv4 or IPv6; not 0.0.0.0 or ::); `port` 0 picks a free one.
  /// With Trust::kSameUser it listens at an abstract Unix socket instead, and `address` must be a
  /// loopback address. `reports_deaths`: once a client has disconnected without leaving, every
  /// `get` of a key that is not set raises PeerDiedError. `num_ranks`: how many ranks will join; 0:
  /// not known.
  TcpStoreServer(const std::string& address, int port, const Token& token,
                 bool reports_deaths = false, int num_ranks = 0);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const { return port_; }

  /// Refuses new clients, serves the connected ones until all have left or `linger_s` has passed,
  /// then disconnects the rest (their calls raise PeerDiedError) and ends the thread. With
  /// `linger_s` 0 it does not wait for clients. A second call does nothing.
  void stop(double linger_s = 0);

 private:
  struct Death {
    int rank;
    std::string text;
  };

  void listen_on(const std::string& address, int port);
  void listen_for_own_user(const std::string& address, int port);
  void serve();
  void accept_all();
  void advance(StoreConnection& connection);
  void handle_hello(StoreConnection& connection, const std::string& frame);
  void handle_proof(StoreConnection& connection, const std::string& frame);
  void handle_request(StoreConnection& connection, const std::string& frame);
  void set_value(const std::string& key, std::string value);
  /// Memory of values and connections.
  size_t used_bytes() const;
  void report_second_claim(const StoreConnection& second, const std::string& holder);
  void report_death(int rank, const std::string& text);
  std::string death_frame(uint32_t number) const;
  void drop_the_gone();
  /// Reports an error of the thread to all ranks that have joined.
  void fail(const std::string& text);
  int64_t poll_wait_ns() const;

  const std::string token_;
  const bool for_own_user_;
  const bool encrypted_;
  const bool reports_deaths_;
  const int num_ranks_;
  int port_ = 0;
  Fd listener_;
  Fd wake_;
  std::atomic<int64_t> stop_at_ns_;
  std::thread thread_;

  // Used by the thread only.
  int64_t accept_after_ns_ = 0;
  std::vector<std::unique_ptr<StoreConnection>> connections_;
  std::map<std::string, std::string> values_;
  size_t stored_bytes_ = 0;            // memory of `values_`
  std::map<int, std::string> joined_;  // addresses of the ranks that have joined
  std::optional<Death> death_;         // the first one
  SilentProcesses silent_;
};

}  // namespace pycoll
