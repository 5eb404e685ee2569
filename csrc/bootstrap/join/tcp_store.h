// The Store of rank 0's TcpStoreServer.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "bootstrap/join/store.h"
#include "bootstrap/join/store_protocol.h"
#include "bootstrap/security/channel.h"
#include "bootstrap/security/token.h"

namespace pycoll {

/// Every call raises PeerDiedError for rank 0 once the server is gone.
class TcpStore final : public Store {
 public:
  /// Connects, retrying until the deadline: rank 0 may start later. Raises TimeoutError without
  /// an answer or if the server does not prove that it knows the token, and UsageError if the
  /// server has another token. With Trust::kSameUser, connects to a process of this user at the
  /// abstract Unix socket of that port. The deadline's timeout also bounds how long `set` and `add`
  /// wait for the server's answer. `watch` is called while it connects, and may throw.
  TcpStore(const std::string& address, int port, const Token& token, int rank,
           const Deadline& deadline, const Deadline::Interrupt& watch = nullptr);
  ~TcpStore() override { close(); }
  /// Tells the server that this rank leaves on purpose, and disconnects.
  void close();
  TcpStore(const TcpStore&) = delete;
  TcpStore& operator=(const TcpStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t delta) override;
  /// Tells all clients that `rank` has ended: a `get` that waits raises PeerDiedError with `text`.
  /// For deaths that the server cannot see: of a rank that had not come to the store yet.
  void report_death(int rank, const std::string& text);

 private:
  /// Makes one attempt to connect and join; on failure `obstacle_` says why.
  bool try_to_join(const std::string& address, int port, const Token& token,
                   const Deadline& deadline);
  bool try_to_join_own_user(int port, const std::string& token, const Deadline& deadline);
  bool greet(const std::string& token, const Deadline& deadline);
  /// Sends a frame and returns the payload of the answer, whose kind it stores.
  std::string say(StoreFrame kind, const WireWriter& payload, StoreFrame* answer,
                  const Deadline& deadline);
  /// Performs the TLS handshake if TLS is on; false, with the reason in `obstacle_`, if it fails.
  bool encrypt(const Deadline& deadline);
  [[noreturn]] void throw_refused() const;
  [[noreturn]] void throw_token_here_only() const;
  [[noreturn]] void throw_tls_here_only(bool on_this_rank) const;
  std::string request(StoreFrame kind, const WireWriter& payload, const std::string& what,
                      const Deadline& deadline);
  void send_all(const std::string& bytes, const std::string& what, const Deadline& deadline);
  /// Returns the next frame from the server, with any request number.
  std::string receive_frame(const std::string& what, const Deadline& deadline);
  [[noreturn]] void throw_server_gone(const std::string& what) const;

  const int rank_;
  const pid_t pid_;
  const std::string where_;
  const Deadline deadline_;
  std::string obstacle_;
  std::mutex mutex_;
  Channel channel_;
  std::string in_;
  uint32_t last_number_ = 0;
};

}  // namespace pycoll
