// One end of a TCP connection between ranks, plain or encrypted.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <memory>
#include <string_view>
#include <utility>

#include "base/fd.h"
#include "bootstrap/security/tls.h"

namespace pycoll {

class Channel {
 public:
  Channel() = default;
  /// A channel without encryption.
  explicit Channel(Fd socket) : socket_(std::move(socket)) {}
  /// An encrypted channel between two ends that know the secret, over a non-blocking socket.
  Channel(Fd socket, Tls::Role role, std::string_view secret)
      : socket_(std::move(socket)), tls_(std::make_unique<Tls>(socket_.get(), role, secret)) {}

  int fd() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  void reset() { socket_.reset(); }

  /// Continues the TLS handshake. Call it whenever the socket is readable, until it returns kDone.
  /// A plain channel returns kDone at once.
  Tls::Greeting greet() { return tls_ == nullptr ? Tls::Greeting::kDone : tls_->greet(); }
  Tls::Refusal refusal() const { return tls_ == nullptr ? Tls::Refusal::kNone : tls_->refusal(); }
  bool is_encrypted() const { return tls_ != nullptr; }

  /// As sendmsg and recvmsg, without waiting. After EAGAIN the next send must begin with the same
  /// bytes.
  ssize_t send(iovec* parts, size_t num_parts) {
    if (tls_ != nullptr) return tls_->send(parts, num_parts);
    const msghdr message = message_of(parts, num_parts);
    return ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ssize_t receive(iovec* parts, size_t num_parts) {
    if (tls_ != nullptr) return tls_->receive(parts, num_parts);
    msghdr message = message_of(parts, num_parts);
    return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  }
  ssize_t send(std::string_view bytes) {
    iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
    return send(&part, 1);
  }
  ssize_t receive(char* bytes, size_t nbytes) {
    iovec part = {bytes, nbytes};
    return receive(&part, 1);
  }
  /// Whether bytes may be buffered that a poll of the socket does not show: receive() first.
  bool may_have_more() const { return tls_ != nullptr && tls_->may_have_more(); }

 private:
  static msghdr message_of(iovec* parts, size_t num_parts) {
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    return message;
  }

  Fd socket_;
  std::unique_ptr<Tls> tls_;
};

}  // namespace pycoll
