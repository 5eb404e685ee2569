// What carries frames between this process and ranks of other hosts. One file per kind of wire.
//
// A frame is a header and a payload. Frames between two ranks arrive whole and in order. A wire
// needs neither the receiver's memory nor file descriptors: it asks where a payload shall go once
// the header is there, so that a wire of messages can receive headers into buffers posted before.
// One thread at a time calls it, but for wait() and wake(); whoever owns it has the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/protocol_kind.h"

namespace pycoll {

enum class FrameKind : uint8_t {
  kHeartbeat,  // nothing but a sign of life
  kSlot,       // a message of a ring (transport/ring/slot.h)
  kCredit,     // nothing but the heads that every frame has
  kLines,      // of a mailbox (transport/ring/mailbox.h): `word` is the first line's number
  kMail,       // what the reader of a mailbox says: `word` its head, `more` the bytes delivered
  kJoin,       // the sender's end of this communicator is there
  kLeft,       // the sender has left this communicator
  kAsk,        // the sender waits: its state; asks for the receiver's
  kTell,       // the sender's state (transport/proxy/state_snapshot.h)
  kFailure,    // the communicator is broken
};

struct FrameHeader {
  FrameKind kind = FrameKind::kHeartbeat;
  uint8_t protocol = 0;   // kSlot
  uint16_t spare = 0;     // the wire's own
  uint32_t nbytes = 0;    // of the payload
  uint64_t group = 0;     // the communicator
  uint32_t mark = 0;      // kSlot: digest of the sender's call
  uint32_t call = 0;      // kSlot: low bits of the call's number
  uint32_t sequence = 0;  // kSlot: low bits of the message's number on its ring
  // Of every frame of a group: messages that the sender has read from the receiver, by protocol.
  uint32_t heads[kNumSlotProtocols] = {};
  uint32_t spare_too = 0;
  uint64_t word = 0;
  uint64_t more = 0;
};
static_assert(sizeof(FrameHeader) == 56);

/// Where a payload goes: nowhere with no parts, else the parts together are as long as it.
struct PayloadParts {
  int num_parts = 0;
  std::byte* data[2] = {};
  size_t nbytes[2] = {};
};

/// Whom the frames of a wire are for. Ranks are those of the world.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  /// A frame's payload is about to come. False when the header makes no sense.
  virtual bool place(int peer, const FrameHeader& header, PayloadParts* parts) = 0;
  /// The frame is whole.
  virtual void arrived(int peer, const FrameHeader& header) = 0;
  /// Nothing more comes from there: errno, or 0 for an orderly end.
  virtual void lost(int peer, int error) = 0;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string_view name() const = 0;

  /// Sends at once what can be sent, and keeps the rest for poll(). The payload stays as it is
  /// until the peer has it, which the caller learns by other means; `keep` makes a copy instead. To
  /// a peer that is lost, nothing happens.
  virtual void send(int peer, const FrameHeader& header, const void* payload, bool keep) = 0;
  /// Moves on what waits to be sent, and takes what has come: first from `first`, if it is a rank.
  /// True when anything moved.
  virtual bool poll(FrameSink& sink, int first) = 0;
  /// Sleeps until poll() may move something, until wake(), or for so long. Any thread.
  virtual void wait(int64_t ns) = 0;
  /// Sleeps until wake(), or for so long. One thread.
  virtual void pause(int64_t ns) = 0;
  virtual void wake() = 0;
  virtual bool has_unsent() const = 0;
  /// All that was sent has reached the peers' hosts: a process that ends now takes nothing along.
  virtual bool has_delivered() const { return !has_unsent(); }
  /// The owner of this memory takes it back: what is still unsent of it is copied, and what is on
  /// its way there goes nowhere.
  virtual void let_go(const std::byte* begin, const std::byte* end) = 0;
  /// No more frames to and from there.
  virtual void close(int peer) = 0;
  /// In a forked process: lets go of what it shares with its parent, without a word.
  virtual void disown() = 0;
};

}  // namespace pycoll
