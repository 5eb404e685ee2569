// The packets between the leader of a local group and the other ranks.
#pragma once

#include <string>

#include "base/error.h"
#include "bootstrap/join/serialize.h"

namespace pycoll {

enum class GroupPacket : uint8_t {
  kHello,    // rank to leader: text token, int32 rank, int32 num_ranks, uint64 shared_bytes; pidfd
  kGiveUp,   // rank to leader: double timeout_s; its deadline has passed
  kWelcome,  // leader to rank: int32 pid of each rank; the memory, then all pidfds unless they are
             // known
  kFailure,  // leader to rank: a GroupFailure
};

/// Why a group cannot form; raised in the same words on every rank.
struct GroupFailure {
  enum class Kind : uint8_t { kTimeout, kPeerDied, kUsage, kSystem };
  Kind kind = Kind::kSystem;
  std::string text;
  int rank = 0;    // kPeerDied: the rank that ended
  int signal = 0;  // kPeerDied: the signal that ended it

  [[noreturn]] void raise() const {
    if (kind == Kind::kTimeout) throw TimeoutError(text);
    if (kind == Kind::kPeerDied) throw PeerDiedError(text, rank, signal);
    if (kind == Kind::kUsage) throw UsageError(text);
    throw SystemError(text);
  }

  std::string to_bytes() const {
    WireWriter writer;
    writer.number(static_cast<uint8_t>(GroupPacket::kFailure)).number(static_cast<uint8_t>(kind));
    writer.text(text).number(static_cast<int32_t>(rank)).number(static_cast<int32_t>(signal));
    return writer.bytes();
  }

  /// Reads the packet after its first byte.
  static GroupFailure from(WireReader& reader) {
    GroupFailure failure;
    failure.kind = static_cast<Kind>(reader.number<uint8_t>());
    failure.text = reader.text();
    failure.rank = reader.number<int32_t>();
    failure.signal = reader.number<int32_t>();
    reader.expect_end();
    return failure;
  }
};

}  // namespace pycoll
