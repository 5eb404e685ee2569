// The handshake by which both ends of a new connection prove that they belong to one session.
//
//   connector -> acceptor: magic, own rank, rank of the acceptor, a random number
//   acceptor -> connector: a random number
//   connector -> acceptor: HMAC(key, "connect", ranks, both numbers)
//   acceptor -> connector: HMAC(key, "accept", ranks, both numbers)
//   connector -> acceptor: one byte: the connection is chosen
//
// The acceptor sends its proof only after the connector's. Messages have a fixed size and no byte
// beyond them is read: it belongs to the link.
#pragma once

#include <functional>
#include <string>

#include "bootstrap/security/channel.h"

namespace pycoll {

class MeshHandshake {
 public:
  enum class State { kGoesOn, kProved, kChosen, kFailed };

  /// The connector's end.
  MeshHandshake(const std::string& key, int rank, int peer);
  /// The acceptor's end, which learns the peer's rank from the hello.
  MeshHandshake(const std::string& key, int rank);

  /// Sends and receives as far as the channel allows. kProved: the connector may choose(). kChosen:
  /// the acceptor's link is established. `wanted(rank)`: whether the acceptor expects that rank.
  State advance(Channel& channel, const std::function<bool(int)>& wanted);
  /// Tells the acceptor that this connection is chosen. False if the other end is gone.
  bool choose(Channel& channel);
  int peer() const { return peer_; }

 private:
  enum class Step {
    kSayHello,
    kHearHello,
    kHearNumber,
    kHearProof,
    kHearAnswer,
    kHearChoice,
    kDone
  };

  bool send(Channel& channel, const std::string& bytes);
  bool hear(Channel& channel, size_t nbytes);
  std::string hello() const;
  std::string proof(const char* role) const;
  bool take_hello(const std::function<bool(int)>& wanted);

  const std::string& key_;
  const bool connects_;
  const int rank_;
  int peer_;
  Step step_;
  std::string own_number_;
  std::string peer_number_;
  std::string in_;
  bool failed_ = false;
};

}  // namespace pycoll
