#include "bootstrap/join/tcp_store.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/printable.h"
#include "base/socket.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/local/packet_socket.h"
#include "bootstrap/security/challenge.h"
#include "bootstrap/security/openssl.h"
#include "bootstrap/security/tls_setting.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr const char* kNoAnswer = "the server did not answer";

/// Connects to one address. Returns an empty Fd and sets errno on failure.
Fd connect_to(const SocketAddress& address, const Deadline& deadline) {
  Fd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return socket;
  const int on = 1;
  // SO_REUSEADDR: if this socket gets that port as its own, rank 0 can still listen on it.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  set_store_options(socket.get());
  int error = 0;
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    error = errno;
    if (error == EINPROGRESS || error == EINTR) {
      socklen_t nbytes = sizeof(error);
      error = ETIMEDOUT;
      if (wait_for_fd(socket.get(), POLLOUT, deadline)) {
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &nbytes);
      }
    }
  }
  if (error == 0 && is_connected_to_itself(socket.get())) error = ECONNREFUSED;
  if (error != 0) socket.reset();
  errno = error;
  return socket;
}

/// Whether a store of this user, without a secret, serves that port.
bool has_store_of_own_user(int port) {
  const Fd socket = connect_at(store_socket_name(port), SOCK_STREAM);
  pid_t pid = -1;
  return socket && is_own_user(socket.get(), &pid);
}

}  // namespace

TcpStore::TcpStore(const std::string& address, int port, const Token& token, int rank,
                   const Deadline& deadline, const Deadline::Interrupt& watch)
    : rank_(rank),
      pid_(::getpid()),
      where_(printable(join_host_port(address, port))),
      deadline_(deadline) {
  check_token(token.text);
  const Deadline watched = watch ? deadline.with(watch) : deadline;
  if (tls_is_on() && token.trust == Trust::kSecret) openssl();  // raises, if there is none
  // Rank 0 is usually late by milliseconds, or by seconds if it is started by hand.
  for (int pause = 5; !try_to_join(address, port, token, watched);
       pause = std::min(2 * pause, 200)) {
    if (deadline.expired()) {
      throw TimeoutError("rank " + std::to_string(rank) + " could not reach the store at " +
                         where_ + " within " + format_seconds(deadline.timeout_s()) + " (" +
                         obstacle_ + "): start rank 0, or set MASTER_ADDR and MASTER_PORT");
    }
    pause_ms(pause, watched);
  }
}

void TcpStore::close() {
  // A forked child has the connection too, but only its parent leaves.
  if (channel_ && ::getpid() == pid_) {
    channel_.send(store_frame(StoreFrame::kLeave, ++last_number_, WireWriter()));
  }
  channel_.reset();
}

bool TcpStore::try_to_join(const std::string& address, int port, const Token& token,
                           const Deadline& deadline) {
  try {
    if (token.trust == Trust::kSameUser) {
      check_store_address(address, port);
      return try_to_join_own_user(port, token.text, deadline);
    }
    for (const SocketAddress& candidate : resolve_tcp(address, port)) {
      Fd socket = connect_to(candidate, deadline);
      if (!socket) {
        obstacle_ = std::strerror(errno);
        if (candidate.is_loopback() && has_store_of_own_user(port)) throw_token_here_only();
        continue;
      }
      channel_ = tls_is_on() ? Channel(std::move(socket), Tls::Role::kConnects, token.text)
                             : Channel(std::move(socket));
      if (encrypt(deadline) && greet(token.text, deadline)) return true;
      channel_.reset();
    }
  } catch (const SystemError& error) {
    obstacle_ = error.what();
  }
  return false;
}

bool TcpStore::try_to_join_own_user(int port, const std::string& token, const Deadline& deadline) {
  Fd socket = connect_at(store_socket_name(port), SOCK_STREAM);
  if (!socket) {
    obstacle_ = std::strerror(errno);
    return false;
  }
  pid_t pid = -1;
  if (!is_own_user(socket.get(), &pid)) {
    obstacle_ = "a process of another user listens there";
    return false;
  }
  channel_ = Channel(std::move(socket));
  if (greet(token, deadline)) return true;
  channel_.reset();
  return false;
}

bool TcpStore::encrypt(const Deadline& deadline) {
  for (;;) {
    switch (channel_.greet()) {
      case Tls::Greeting::kDone:
        return true;
      case Tls::Greeting::kFailed:
        if (channel_.refusal() == Tls::Refusal::kOtherSecret) throw_refused();
        if (channel_.refusal() == Tls::Refusal::kNoTls) throw_tls_here_only(true);
        obstacle_ = "the server did not prove with TLS that it knows the session token";
        return false;
      case Tls::Greeting::kGoesOn:
        if (wait_for_fd(channel_.fd(), POLLIN, deadline)) continue;
        if (obstacle_.empty()) obstacle_ = kNoAnswer;
        return false;
    }
  }
}

void TcpStore::throw_refused() const {
  throw UsageError("the store at " + where_ + " refused rank " + std::to_string(rank_) +
                   ": their session tokens differ; set the same PYCOLL_TOKEN on every "
                   "rank, or another MASTER_PORT if that store belongs to another job");
}

void TcpStore::throw_token_here_only() const {
  throw UsageError("rank " + std::to_string(rank_) + " has a PYCOLL_TOKEN, and the store at " +
                   where_ + " has none: set the same PYCOLL_TOKEN on every rank");
}

void TcpStore::throw_tls_here_only(bool on_this_rank) const {
  const std::string here = "rank " + std::to_string(rank_);
  const std::string there = "the store at " + where_;
  throw UsageError((on_this_rank ? here : there) + " wants TLS, and " +
                   (on_this_rank ? there : here) + " does not: set " + kTlsVariable +
                   " to the same value on all ranks");
}

bool TcpStore::greet(const std::string& token, const Deadline& deadline) {
  in_.clear();
  const std::string key = store_key(token);
  Challenge challenge = {.connector = rank_,
                         .acceptor = 0,
                         .connector_number = random_bytes(kChallengeBytes),
                         .acceptor_number = {}};
  try {
    WireWriter hello;
    hello.text(kStoreMagic).number(static_cast<int32_t>(rank_)).text(challenge.connector_number);
    StoreFrame answer;
    challenge.acceptor_number = say(StoreFrame::kHello, hello, &answer, deadline);
    if (answer != StoreFrame::kChallenge || challenge.acceptor_number.size() != kChallengeBytes) {
      throw MalformedMessage();
    }
    const WireWriter proof = WireWriter().text(challenge.proof(key, "connect"));
    const std::string text = say(StoreFrame::kProof, proof, &answer, deadline);
    if (answer == StoreFrame::kRefused) throw_refused();
    if (answer == StoreFrame::kTaken) {
      obstacle_ = "rank " + std::to_string(rank_) + " has already joined that session from " +
                  printable(text) +
                  ": two processes have this rank, or rank 0 has not closed its previous session";
      return false;
    }
    if (answer == StoreFrame::kError) {
      obstacle_ = printable(text);
      return false;
    }
    if (answer != StoreFrame::kOk) throw MalformedMessage();
    if (same_token(challenge.proof(key, "accept"), text)) return true;
    obstacle_ = "the server there does not know the session token";
  } catch (const PeerDiedError&) {
    if (Tls::is_refusal(in_)) throw_tls_here_only(false);
    obstacle_ = "the server closed the connection";
  } catch (const TimeoutError&) {
    // The deadline cut off this attempt: the reason of an earlier failure says more.
    if (obstacle_.empty()) obstacle_ = kNoAnswer;
  } catch (const MalformedMessage&) {
    if (Tls::is_refusal(in_)) throw_tls_here_only(false);
    obstacle_ = "the server there is not a pycoll store";
  }
  return false;
}

std::string TcpStore::say(StoreFrame kind, const WireWriter& payload, StoreFrame* answer,
                          const Deadline& deadline) {
  const uint32_t number = ++last_number_;
  send_all(store_frame(kind, number, payload), "hello", deadline);
  const std::string frame = receive_frame("hello", deadline);
  WireReader reader(frame);
  *answer = static_cast<StoreFrame>(reader.number<uint8_t>());
  if (reader.number<uint32_t>() != number) throw MalformedMessage();
  const std::string text(reader.text());
  reader.expect_end();
  return text;
}

void TcpStore::set(const std::string& key, const std::string& value) {
  request(StoreFrame::kSet, WireWriter().text(key).text(value), "set '" + key + "'",
          deadline_.restarted());
}

std::string TcpStore::get(const std::string& key, const Deadline& deadline) {
  return request(StoreFrame::kGet, WireWriter().text(key), "get '" + key + "'", deadline);
}

int64_t TcpStore::add(const std::string& key, int64_t delta) {
  return std::stoll(request(StoreFrame::kAdd, WireWriter().text(key).number(delta),
                            "add to '" + key + "'", deadline_.restarted()));
}

void TcpStore::report_death(int rank, const std::string& text) {
  request(StoreFrame::kDied, WireWriter().text(text).number(static_cast<int32_t>(rank)),
          "reporting a death", deadline_.restarted());
}

std::string TcpStore::request(StoreFrame kind, const WireWriter& payload, const std::string& what,
                              const Deadline& deadline) {
  const std::lock_guard lock(mutex_);
  const uint32_t number = ++last_number_;
  const std::string message = store_frame(kind, number, payload);
  if (message.size() > kMaxFrameBytes) {
    throw UsageError(what + ": " + std::to_string(message.size()) +
                     " bytes; the store takes at most " + std::to_string(kMaxFrameBytes));
  }
  if (!channel_) throw_server_gone(what);
  try {
    send_all(message, what, deadline);
    while (true) {
      const std::string frame = receive_frame(what, deadline);
      WireReader reader(frame);
      const auto reply = static_cast<StoreFrame>(reader.number<uint8_t>());
      const bool is_reply = reader.number<uint32_t>() == number;
      if (reply == StoreFrame::kFailed) {
        channel_.reset();
        throw SystemError("rank " + std::to_string(rank_) + ": " + what + ": " +
                          std::string(reader.text()));
      }
      if (!is_reply) continue;  // the late reply to a get that timed out
      const std::string text(reader.text());
      if (reply == StoreFrame::kError) throw UsageError(text);
      if (reply == StoreFrame::kGone) throw PeerDiedError(text, reader.number<int32_t>(), 0);
      if (reply != StoreFrame::kOk) throw MalformedMessage();
      return text;
    }
  } catch (const PeerDiedError& error) {
    if (error.rank() == 0) channel_.reset();
    throw;
  } catch (const MalformedMessage&) {
    channel_.reset();
    throw_server_gone(what);
  }
}

void TcpStore::send_all(const std::string& bytes, const std::string& what,
                        const Deadline& deadline) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t now = channel_.send(std::string_view(bytes).substr(sent));
    if (now > 0) {
      sent += static_cast<size_t>(now);
    } else if (errno == EAGAIN) {
      if (wait_for_fd(channel_.fd(), POLLOUT, deadline)) continue;
      channel_.reset();  // a request sent in part cannot be taken back
      throw TimeoutError("rank " + std::to_string(rank_) + ": " + what + ": the store at " +
                         where_ + " accepted no data for " + format_seconds(deadline.timeout_s()));
    } else if (errno != EINTR) {
      throw_server_gone(what);
    }
  }
}

std::string TcpStore::receive_frame(const std::string& what, const Deadline& deadline) {
  while (true) {
    if (auto frame = take_frame(in_, kMaxFrameBytes + kMaxHelloBytes)) return *std::move(frame);
    if (!channel_.may_have_more() && !wait_for_fd(channel_.fd(), POLLIN, deadline)) {
      throw TimeoutError("rank " + std::to_string(rank_) + " waited " +
                         format_seconds(deadline.timeout_s()) + " for " + what +
                         " from the store at " + where_);
    }
    char buffer[65536];
    const ssize_t received = channel_.receive(buffer, sizeof(buffer));
    if (received > 0) {
      in_.append(buffer, static_cast<size_t>(received));
    } else if (received == 0 || (errno != EAGAIN && errno != EINTR)) {
      throw_server_gone(what);
    }
  }
}

void TcpStore::throw_server_gone(const std::string& what) const {
  throw PeerDiedError("rank " + std::to_string(rank_) + ": " + what + ": the store at " + where_ +
                          " is gone: rank 0 ended, or closed its communicator",
                      0, 0);
}

}  // namespace pycoll
