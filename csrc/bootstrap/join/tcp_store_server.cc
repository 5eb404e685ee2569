#include "bootstrap/join/tcp_store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/printable.h"
#include "base/socket.h"
#include "bootstrap/join/store_connection.h"
#include "bootstrap/join/store_protocol.h"
#include "bootstrap/local/packet_socket.h"
#include "bootstrap/security/tls_setting.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kOutOfFdsPauseNs = 100'000'000;
constexpr int64_t kSilentNs = 10'000'000;  // between two looks at processes that said nothing
constexpr int kBacklog = 512;
constexpr size_t kEntryBytes = 128;  // memory of a key and its value, besides their bytes

}  // namespace

TcpStoreServer::TcpStoreServer(const std::string& address, int port, const Token& token,
                               bool reports_deaths, int num_ranks)
    : token_(token.text),
      for_own_user_(token.trust == Trust::kSameUser),
      encrypted_(tls_is_on() && !for_own_user_),
      reports_deaths_(reports_deaths),
      num_ranks_(num_ranks),
      stop_at_ns_(kNever) {
  check_token(token_);
  if (encrypted_) openssl();  // raises here, in the caller's thread, if there is none
  for_own_user_ ? listen_for_own_user(address, port) : listen_on(address, port);
  set_value(kSecondClaimsKey, "");
  wake_ = Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw_system_error("eventfd");
  const BlockedSignals blocked;
  thread_ = start_thread(
      "the thread of the store server", [this] { serve(); },
      [this](const std::string& text) { fail(text); });
}

TcpStoreServer::~TcpStoreServer() { stop(); }

void TcpStoreServer::listen_on(const std::string& address, int port) {
  const std::string where = join_host_port(address, port);
  std::string why;
  for (const SocketAddress& candidate : resolve_tcp(address, port)) {
    if (candidate.is_any()) {
      throw UsageError("the store cannot listen on every interface (" + address +
                       "): set MASTER_ADDR to the one address at which the ranks reach rank 0");
    }
    Fd socket(::socket(candidate.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    if (socket && ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(socket.get(), candidate.get(), candidate.length) == 0 &&
        ::listen(socket.get(), kBacklog) == 0) {
      port_ = local_address(socket.get()).port();
      listener_ = std::move(socket);
      return;
    }
    why = std::strerror(errno);
  }
  throw SystemError("rank 0 cannot listen at " + where + ": " + why +
                    "; MASTER_ADDR must be an address of rank 0's host, and MASTER_PORT free");
}

void TcpStoreServer::listen_for_own_user(const std::string& address, int port) {
  check_store_address(address, port);
  try {
    listener_ = listen_at(store_socket_name(port), SOCK_STREAM);
  } catch (const SystemError& error) {
    throw SystemError("rank 0 cannot listen at " + join_host_port(address, port) + ": " +
                      error.what() + "; another job uses this MASTER_PORT");
  }
  port_ = port;
}

void TcpStoreServer::stop(double linger_s) {
  if (!thread_.joinable()) return;
  stop_at_ns_ = now_ns() + static_cast<int64_t>(std::max(linger_s, 0.0) * kSecondNs);
  const uint64_t one = 1;
  while (::write(wake_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  connections_.clear();
  wake_.reset();
}

void TcpStoreServer::serve() {
  std::vector<pollfd> fds;
  while (true) {
    const bool stopping = stop_at_ns_ != kNever;
    if (stopping) {
      // shutdown() works even if a forked child still holds the listening socket.
      if (listener_) ::shutdown(listener_.get(), SHUT_RDWR);
      listener_.reset();
      std::erase_if(connections_, [](const auto& one) { return !one->welcome; });
      if (connections_.empty() || now_ns() >= stop_at_ns_) break;
    }
    const bool accepting = listener_ && now_ns() >= accept_after_ns_;
    fds.clear();
    fds.push_back({.fd = stopping ? -1 : wake_.get(), .events = POLLIN, .revents = 0});
    fds.push_back({.fd = accepting ? listener_.get() : -1, .events = POLLIN, .revents = 0});
    for (const auto& one : connections_) {
      // A client with unread replies: read no more of its requests.
      const short events = one->out.empty() ? POLLIN : POLLOUT;
      fds.push_back({.fd = one->channel.fd(), .events = events, .revents = 0});
    }
    poll_fds(fds, poll_wait_ns());
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (fds[2 + i].revents == 0) continue;
      if (connections_[i]->out.empty()) connections_[i]->fill();
      // One request may be received beyond the limit: its answer says that there is no room.
      const bool is_small = connections_[i]->in.size() <= kMaxHelloBytes;
      if (is_small || used_bytes() <= kMaxStoreBytes + kMaxFrameBytes) {
        advance(*connections_[i]);
      } else {
        connections_[i]->channel.reset();
      }
    }
    if (fds[1].revents != 0) accept_all();
    drop_the_gone();
  }
  for (const auto& one : connections_) ::shutdown(one->channel.fd(), SHUT_RDWR);
}

void TcpStoreServer::fail(const std::string& text) {
  listener_.reset();
  std::erase_if(connections_, [](const auto& one) { return !one->channel || !one->welcome; });
  for (const auto& one : connections_) {
    one->reply(StoreFrame::kFailed, 0, "rank 0: " + text);
    one->flush();
    // The connection stays open for reading: a reset would discard what the client has not read.
    if (one->channel) ::shutdown(one->channel.fd(), SHUT_WR);
  }
}

int64_t TcpStoreServer::poll_wait_ns() const {
  int64_t at_ns = std::min(stop_at_ns_.load(), now_ns() + 60 * kSecondNs);
  if (silent_.may_end()) at_ns = std::min(at_ns, now_ns() + kSilentNs);
  if (accept_after_ns_ > now_ns()) at_ns = std::min(at_ns, accept_after_ns_);
  for (const auto& one : connections_) {
    if (!one->welcome) at_ns = std::min(at_ns, one->hello_by_ns);
  }
  return at_ns - now_ns();
}

void TcpStoreServer::accept_all() {
  while (true) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // The connection stays in the queue: accept it later instead of spinning.
        accept_after_ns_ = now_ns() + kOutOfFdsPauseNs;
      }
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    auto connection = std::make_unique<StoreConnection>();
    if (for_own_user_) {
      pid_t pid = -1;
      if (!is_own_user(socket.get(), &pid)) continue;
      connection->where = "process " + std::to_string(pid);
      connection->pid = pid;
    } else {
      set_store_options(socket.get());
      connection->where = peer_text(socket.get());
    }
    connection->channel = encrypted_ ? Channel(std::move(socket), Tls::Role::kAccepts, token_)
                                     : Channel(std::move(socket));
    connection->hello_by_ns = now_ns() + static_cast<int64_t>(kHelloSeconds * kSecondNs);
    connections_.push_back(std::move(connection));
  }
}

void TcpStoreServer::advance(StoreConnection& connection) {
  try {
    // What a client sent before it ended says which rank it was.
    if (!connection.channel && !connection.challenge) {
      if (const auto hello = take_frame(connection.in, kMaxHelloBytes))
        handle_hello(connection, *hello);
    }
    while (connection.flush()) {
      if (!connection.welcome && Tls::is_greeting(connection.in)) {
        connection.out = Tls::refusal_without_tls();
        connection.in.clear();
        connection.closing = true;
        continue;
      }
      const auto frame =
          take_frame(connection.in, connection.welcome ? kMaxFrameBytes : kMaxHelloBytes);
      if (!frame) return;
      if (connection.welcome) {
        handle_request(connection, *frame);
      } else {
        connection.challenge ? handle_proof(connection, *frame) : handle_hello(connection, *frame);
      }
    }
  } catch (const std::exception&) {  // malformed, or no memory or random numbers for it
    connection.channel.reset();
  }
}

void TcpStoreServer::handle_hello(StoreConnection& connection, const std::string& frame) {
  WireReader reader(frame);
  const auto kind = static_cast<StoreFrame>(reader.number<uint8_t>());
  const uint32_t number = reader.number<uint32_t>();
  if (kind != StoreFrame::kHello || reader.text() != kStoreMagic) throw MalformedMessage();
  connection.rank = reader.number<int32_t>();
  const std::string their_number(reader.text());
  reader.expect_end();
  if (their_number.size() != kChallengeBytes) throw MalformedMessage();
  connection.challenge = Challenge{.connector = connection.rank,
                                   .acceptor = 0,
                                   .connector_number = their_number,
                                   .acceptor_number = random_bytes(kChallengeBytes)};
  connection.reply(StoreFrame::kChallenge, number, connection.challenge->acceptor_number);
}

void TcpStoreServer::handle_proof(StoreConnection& connection, const std::string& frame) {
  WireReader reader(frame);
  const auto kind = static_cast<StoreFrame>(reader.number<uint8_t>());
  const uint32_t number = reader.number<uint32_t>();
  if (kind != StoreFrame::kProof) throw MalformedMessage();
  const std::string_view proof = reader.text();
  reader.expect_end();
  const std::string key = store_key(token_);
  const auto holder = joined_.find(connection.rank);
  if (!same_token(connection.challenge->proof(key, "connect"), proof)) {
    connection.closing = true;
    connection.reply(StoreFrame::kRefused, number, "");
  } else if (holder != joined_.end()) {
    connection.closing = true;
    connection.reply(StoreFrame::kTaken, number, holder->second);
    report_second_claim(connection, holder->second);
  } else if (joined_.size() == kMaxStoreClients) {
    connection.closing = true;
    connection.reply(StoreFrame::kError, number,
                     std::to_string(kMaxStoreClients) + " processes have joined that session");
  } else {
    joined_[connection.rank] = connection.where;
    connection.welcome = true;
    connection.reply(StoreFrame::kOk, number, connection.challenge->proof(key, "accept"));
  }
}

void TcpStoreServer::report_second_claim(const StoreConnection& second, const std::string& holder) {
  std::string report = values_[kSecondClaimsKey];
  const std::string claim = "rank " + std::to_string(second.rank) + " has joined from " + holder +
                            ", and a second claim of it was refused";
  if (report.find(claim) == std::string::npos && report.size() < kMaxHelloBytes) {
    report += (report.empty() ? "" : "; ") + claim + " (from " + second.where + ")";
    set_value(kSecondClaimsKey, report);
  }
}

void TcpStoreServer::handle_request(StoreConnection& connection, const std::string& frame) {
  WireReader reader(frame);
  const auto kind = static_cast<StoreFrame>(reader.number<uint8_t>());
  const uint32_t number = reader.number<uint32_t>();
  if (kind == StoreFrame::kLeave) {
    connection.left = true;
    return;
  }
  if (kind == StoreFrame::kDied) {
    const std::string text(reader.text().substr(0, kMaxHelloBytes));
    const auto rank = reader.number<int32_t>();
    reader.expect_end();
    report_death(rank, text);
    return connection.reply(StoreFrame::kOk, number, "");
  }
  const std::string key(reader.text());
  const auto refuses = [&](size_t nbytes) {
    if (used_bytes() + nbytes <= kMaxStoreBytes) return false;
    connection.reply(StoreFrame::kError, number,
                     "rank " + std::to_string(connection.rank) + ": the store has no room for '" +
                         printable(key, 64) + "': expected at most " +
                         std::to_string(kMaxStoreBytes >> 20) +
                         " MiB of keys, values and unread answers");
    return true;
  };
  if (kind == StoreFrame::kSet) {
    const std::string value(reader.text());
    reader.expect_end();
    if (death_) {
      // Else a rank that asks later would go on, and those that were told of the death would not.
      connection.out += death_frame(number);
      return;
    }
    const auto num_waiting = static_cast<size_t>(
        std::count_if(connections_.begin(), connections_.end(),
                      [&key](const auto& one) { return one->wait && one->wait->key == key; }));
    if (refuses(kEntryBytes + key.size() + (1 + num_waiting) * value.size())) return;
    set_value(key, value);
    connection.reply(StoreFrame::kOk, number, "");
  } else if (kind == StoreFrame::kGet) {
    reader.expect_end();
    const auto found = values_.find(key);
    if (refuses(found == values_.end() ? key.size() : found->second.size())) return;
    if (found != values_.end()) {
      connection.reply(StoreFrame::kOk, number, found->second);
    } else if (death_) {
      connection.out += death_frame(number);
    } else {
      connection.wait = StoreConnection::Wait{key, number};
    }
  } else if (kind == StoreFrame::kAdd) {
    const int64_t delta = reader.number<int64_t>();
    reader.expect_end();
    const auto found = values_.find(key);
    const auto before = found == values_.end() ? 0 : parse_decimal(found->second);
    int64_t sum = 0;
    if (!before || __builtin_add_overflow(*before, delta, &sum)) {
      connection.reply(StoreFrame::kError, number,
                       "add: the value of '" + key + "' is not a number, or the sum is too large");
      return;
    }
    const std::string text = std::to_string(sum);
    if (delta != 0 && refuses(kEntryBytes + key.size() + text.size())) return;
    if (delta != 0) set_value(key, text);
    connection.reply(StoreFrame::kOk, number, text);
  } else {
    throw MalformedMessage();
  }
}

void TcpStoreServer::set_value(const std::string& key, std::string value) {
  const auto [entry, is_new] = values_.try_emplace(key);
  stored_bytes_ += (is_new ? kEntryBytes + key.size() : 0) + value.size() - entry->second.size();
  const std::string& stored = entry->second = std::move(value);
  for (const auto& one : connections_) {
    if (!one->channel || !one->wait || one->wait->key != key) continue;
    one->reply(StoreFrame::kOk, one->wait->number, stored);
    one->wait.reset();
    one->flush();
  }
}

size_t TcpStoreServer::used_bytes() const {
  size_t used = stored_bytes_;
  for (const auto& one : connections_) used += one->buffered_bytes();
  return used;
}

std::string TcpStoreServer::death_frame(uint32_t number) const {
  return store_frame(StoreFrame::kGone, number,
                     WireWriter().text(death_->text).number(static_cast<int32_t>(death_->rank)));
}

void TcpStoreServer::report_death(int rank, const std::string& text) {
  if (!reports_deaths_ || death_) return;
  death_ = Death{rank, text};
  for (const auto& one : connections_) {
    if (!one->channel || !one->wait) continue;
    one->out += death_frame(one->wait->number);
    one->wait.reset();
    one->flush();
  }
}

void TcpStoreServer::drop_the_gone() {
  size_t num_unauthenticated = 0;
  for (const auto& one : connections_) num_unauthenticated += !one->welcome;
  for (const auto& one : connections_) {  // oldest first
    const bool is_late = num_unauthenticated > kMaxUnauthenticated || now_ns() >= one->hello_by_ns;
    if (one->welcome || !is_late) continue;
    one->channel.reset();
    --num_unauthenticated;
  }
  const auto died = [this](int rank, const std::string& how) {
    const std::string who = "rank " + std::to_string(rank);
    report_death(rank, who + " ended while the ranks were joining: " + how);
  };
  for (const auto& one : connections_) {
    // For a process of this user, the rank that it says is as good as a proven one.
    const bool is_known = one->welcome || (for_own_user_ && one->rank >= 0 && !one->closing &&
                                           !joined_.contains(one->rank));
    if (one->channel || one->left) continue;
    if (is_known)
      died(one->rank, "its connection to the store, from " + one->where + ", has ended");
    if (one->rank < 0 && one->pid > 0) silent_.add(one->pid);
  }
  std::erase_if(connections_, [](const auto& one) { return !one->channel; });
  // Once all others have come, a process that ended before it said its rank was the missing one.
  int missing = 0;
  while (joined_.contains(missing)) ++missing;
  const auto& ended = silent_.ended();
  if (ended.empty() || std::ssize(joined_) + 1 != num_ranks_ || missing >= num_ranks_) return;
  died(missing, "process " + std::to_string(ended.front().pid) + " ended before it said its rank");
}

}  // namespace pycoll
