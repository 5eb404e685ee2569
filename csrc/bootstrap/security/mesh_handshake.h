// How the two ends of a new connection prove to each other that they belong to one session.
//
//   connector -> acceptor: magic, own rank, the rank that is meant, a random number
//   acceptor -> connector: a random number
//   connector -> acceptor: HMAC(key, "connect", ranks, both numbers)
//   acceptor -> connector: HMAC(key, "accept", ranks, both numbers)
//   connector -> acceptor: one byte: this connection it is
//
// The acceptor proves nothing before the connector has. Messages are of fixed size and are read to
// the byte: what follows them belongs to the link.
#pragma once

#include <functional>
#include <string>

#include "bootstrap/security/channel.h"

namespace pycoll {

class MeshHandshake {
 public:
  enum class State { kGoesOn, kProved, kChosen, kFailed };

  /// Of the connector.
  MeshHandshake(const std::string& key, int rank, int peer);
  /// Of the acceptor, who learns who comes.
  MeshHandshake(const std::string& key, int rank);

  /// Sends and reads what the channel allows. kProved: the connector may choose(). kChosen: the
  /// acceptor's link is made. `wanted(rank)`: whether the acceptor expects that rank.
  State advance(Channel& channel, const std::function<bool(int)>& wanted);
  /// Says that this connection it is. False when the other end has gone.
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
