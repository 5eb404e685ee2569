#include "bootstrap/security/mesh_handshake.h"

#include <cerrno>
#include <cstdint>

#include "bootstrap/join/serialize.h"
#include "bootstrap/security/challenge.h"
#include "bootstrap/security/token.h"

namespace pycoll {
namespace {

constexpr std::string_view kMagic = "pycoll 1";
constexpr size_t kHelloBytes = 8 + 2 * sizeof(int32_t) + kChallengeBytes;
constexpr char kChoice = 'K';

}  // namespace

MeshHandshake::MeshHandshake(const std::string& key, int rank, int peer)
    : key_(key),
      connects_(true),
      rank_(rank),
      peer_(peer),
      step_(Step::kSayHello),
      own_number_(random_bytes(kChallengeBytes)) {}

MeshHandshake::MeshHandshake(const std::string& key, int rank)
    : key_(key),
      connects_(false),
      rank_(rank),
      peer_(-1),
      step_(Step::kHearHello),
      own_number_(random_bytes(kChallengeBytes)) {}

MeshHandshake::State MeshHandshake::advance(Channel& channel,
                                            const std::function<bool(int)>& wanted) {
  for (;;) {
    switch (step_) {
      case Step::kSayHello:
        if (!send(channel, hello())) return State::kFailed;
        step_ = Step::kHearNumber;
        break;
      case Step::kHearHello:
        if (!hear(channel, kHelloBytes)) return failed_ ? State::kFailed : State::kGoesOn;
        if (!take_hello(wanted) || !send(channel, own_number_)) return State::kFailed;
        step_ = Step::kHearProof;
        break;
      case Step::kHearNumber:
        if (!hear(channel, kChallengeBytes)) return failed_ ? State::kFailed : State::kGoesOn;
        peer_number_ = std::move(in_);
        in_.clear();
        if (!send(channel, proof("connect"))) return State::kFailed;
        step_ = Step::kHearAnswer;
        break;
      case Step::kHearProof:
        if (!hear(channel, kProofBytes)) return failed_ ? State::kFailed : State::kGoesOn;
        // Another connection of that rank may have been chosen since this one's hello.
        if (!same_token(proof("connect"), in_) || !wanted(peer_)) return State::kFailed;
        in_.clear();
        if (!send(channel, proof("accept"))) return State::kFailed;
        step_ = Step::kHearChoice;
        break;
      case Step::kHearAnswer:
        if (!hear(channel, kProofBytes)) return failed_ ? State::kFailed : State::kGoesOn;
        if (!same_token(proof("accept"), in_)) return State::kFailed;
        step_ = Step::kDone;
        return State::kProved;
      case Step::kHearChoice:
        if (!hear(channel, 1)) return failed_ ? State::kFailed : State::kGoesOn;
        if (in_[0] != kChoice || !wanted(peer_)) return State::kFailed;
        step_ = Step::kDone;
        return State::kChosen;
      case Step::kDone:
        return State::kFailed;
    }
  }
}

bool MeshHandshake::choose(Channel& channel) { return send(channel, std::string(1, kChoice)); }

bool MeshHandshake::send(Channel& channel, const std::string& bytes) {
  // A few bytes on a new connection: a socket that does not accept them is unusable.
  return channel.send(bytes) == static_cast<ssize_t>(bytes.size());
}

bool MeshHandshake::hear(Channel& channel, size_t nbytes) {
  char buffer[64];
  while (in_.size() < nbytes) {
    const ssize_t got = channel.receive(buffer, nbytes - in_.size());
    if (got > 0) {
      in_.append(buffer, static_cast<size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else {
      failed_ = got == 0 || errno != EAGAIN;
      return false;
    }
  }
  return true;
}

std::string MeshHandshake::hello() const {
  WireWriter rest;
  rest.number(static_cast<int32_t>(rank_)).number(static_cast<int32_t>(peer_));
  return std::string(kMagic) + rest.bytes() + own_number_;
}

bool MeshHandshake::take_hello(const std::function<bool(int)>& wanted) {
  if (!in_.starts_with(kMagic)) return false;
  WireReader reader(std::string_view(in_).substr(kMagic.size()));
  peer_ = reader.number<int32_t>();
  const int meant = reader.number<int32_t>();
  peer_number_ = in_.substr(in_.size() - kChallengeBytes);
  in_.clear();
  return meant == rank_ && wanted(peer_);
}

std::string MeshHandshake::proof(const char* role) const {
  const Challenge challenge = {.connector = connects_ ? rank_ : peer_,
                               .acceptor = connects_ ? peer_ : rank_,
                               .connector_number = connects_ ? own_number_ : peer_number_,
                               .acceptor_number = connects_ ? peer_number_ : own_number_};
  return challenge.proof(key_, role);
}

}  // namespace pycoll
