// Wires carry frames between this process and ranks of other hosts. One file per kind of wire.
//
// A frame is a header and a payload. Frames between two ranks arrive whole and in order. A wire
// needs neither the receiver's memory nor file descriptors: once a header has arrived, it asks
// where the payload goes, so that a message-based wire can receive headers into buffers posted
// before. Only one thread at a time calls it, holding its owner's lock, except for wait() and
// wake().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/protocol_kind.h"
#include "base/slot_bytes.h"

namespace pycoll {

enum class FrameKind : uint8_t {
  kHeartbeat,  // a sign of life, without content
  kSlot,       // a message of a ring (transport/ring/slot.h)
  kCredit,     // only the heads, which every frame has
  kLines,      // lines of a mailbox (transport/ring/mailbox.h); `word` numbers the first
  kMail,       // state of a mailbox's reader: `word` its head, `more` the bytes delivered
  kJoin,       // the sender's end of this communicator exists
  kLeft,       // the sender has left this communicator
  kAsk,        // the state of the waiting sender; requests the receiver's
  kTell,       // the sender's state (transport/proxy/state_snapshot.h)
  kFailure,    // the communicator is broken
};

struct FrameHeader {
  FrameKind kind = FrameKind::kHeartbeat;
  uint8_t protocol = 0;   // kSlot
  uint16_t spare = 0;     // for use by the wire
  uint32_t nbytes = 0;    // size of the payload
  uint64_t group = 0;     // the communicator
  uint32_t mark = 0;      // kSlot: digest of the sender's call
  uint32_t call = 0;      // kSlot: low bits of the call's number
  uint32_t sequence = 0;  // kSlot: low bits of the message's number on its ring
  // In every frame of a group: messages that the sender has read from the receiver, by protocol.
  uint32_t heads[kNumSlotProtocols] = {};
  uint32_t spare_too = 0;
  uint64_t word = 0;
  uint64_t more = 0;
};
static_assert(sizeof(FrameHeader) == 56);

/// Largest payload: a slot of a ring, or the largest message of a mailbox.
inline constexpr size_t kMaxPayloadBytes = kSlotBytesBetweenHosts;

/// Memory for a frame with a long payload. The payload begins at a cache line. Pages that no frame
/// has reached do not exist.
struct FrameMemory {
  std::byte* payload() { return frame + sizeof(FrameHeader); }

  alignas(64) std::byte unused[64 - sizeof(FrameHeader)];
  std::byte frame[sizeof(FrameHeader) + kMaxPayloadBytes];
};

/// Payloads of kSimple from this size on are received into such memory, shorter ones into slots.
inline constexpr size_t kLongPayloadBytes = 16384;
/// Largest payload of kAsk, kTell and kFailure.
inline constexpr size_t kMaxStateBytes = 64 << 10;
inline constexpr size_t kMailboxLineBytes = 64;
/// Memory for the frames that one peer does not read; a wire ends the link when it is used up. A
/// correct peer's credits stop this rank far earlier: each communicator has at most 3 MiB of
/// unread slots and 4,096 unread messages.
inline constexpr size_t kMaxUnsentBytes = size_t{256} << 20;

/// Whether the kind of this frame exists and has a payload of this size. Checked before any other
/// part of a frame is used; the proxy then compares the frame with the state of its link.
constexpr bool is_valid(const FrameHeader& header) {
  switch (header.kind) {
    case FrameKind::kHeartbeat:
    case FrameKind::kCredit:
    case FrameKind::kMail:
    case FrameKind::kJoin:
    case FrameKind::kLeft:
      return header.nbytes == 0;
    case FrameKind::kSlot:
      return header.protocol < kNumSlotProtocols && header.nbytes <= kMaxPayloadBytes;
    case FrameKind::kLines:
      return header.nbytes != 0 && header.nbytes % kMailboxLineBytes == 0 &&
             header.nbytes <= kMaxPayloadBytes;
    case FrameKind::kAsk:
    case FrameKind::kTell:
    case FrameKind::kFailure:
      return header.nbytes != 0 && header.nbytes <= kMaxStateBytes;
  }
  return false;
}

/// Destination of a payload: the parts add up to its length; without parts it is discarded.
struct PayloadParts {
  int num_parts = 0;
  std::byte* data[2] = {};
  size_t nbytes[2] = {};
};

/// Receiver of a wire's frames. Ranks are ranks of the world.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  /// Sets the parts for the payload of a frame. False if the header is invalid.
  virtual bool place(int peer, const FrameHeader& header, PayloadParts* parts) = 0;
  /// For wires that have a placed frame with a long payload in memory of their own: the sink keeps
  /// this memory, and gives other memory. False: the wire copies.
  virtual bool swap_memory(int /*peer*/, const FrameHeader& /*header*/,
                           std::unique_ptr<FrameMemory>& /*memory*/) {
    return false;
  }
  /// Called once the whole frame has arrived. False if its payload is invalid.
  virtual bool arrived(int peer, const FrameHeader& header) = 0;
  /// Whether a rank may be about to say where the next long payload goes (Proxy::expect).
  virtual bool has_reader() const { return false; }
  /// Called when `peer` sends no more frames; `error` is an errno, or 0 for an orderly end. EPROTO:
  /// the wire has ended the link because of an invalid frame. EDQUOT: because the peer left
  /// kMaxUnsentBytes unread.
  virtual void lost(int peer, int error) = 0;
};

/// What becomes of the part of a payload that cannot be sent at once.
struct Rest {
  /// The caller leaves it unchanged until the peer has it, which it learns by other means.
  static constexpr Rest stays() { return {}; }
  /// The wire copies it.
  static constexpr Rest copied() { return {true, nullptr}; }
  /// The wire copies it to the same place in this memory, which then stays.
  static constexpr Rest copied_to(std::byte* memory) { return {true, memory}; }

  bool is_copied = false;
  std::byte* memory = nullptr;  // null: the wire's own
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual std::string_view name() const = 0;

  /// Sends as much as possible at once and leaves the rest to poll(). Does nothing for a lost peer.
  virtual void send(int peer, const FrameHeader& header, const void* payload, Rest rest) = 0;
  /// Sends waiting frames and receives frames, first from `first` if it is a rank. True if anything
  /// moved.
  virtual bool poll(FrameSink& sink, int first) = 0;
  /// Whether poll() has stopped for a reader (FrameSink::has_reader) before the end of what came:
  /// the next poll() takes it up. Any thread.
  virtual bool has_stopped() const { return false; }
  /// Whether wait() ends when frames may move, rather than after a time alone.
  virtual bool ends_waits() const { return true; }
  /// Sleeps until poll() may move something, until wake(), or for `ns`. Any thread.
  virtual void wait(int64_t ns) = 0;
  /// Sleeps until wake(), or for `ns`. One thread only.
  virtual void pause(int64_t ns) = 0;
  virtual void wake() = 0;
  virtual bool has_unsent() const = 0;
  /// Frames that wait to be sent to `peer`.
  virtual size_t num_unsent(int peer) const = 0;
  /// Whether all sent frames have reached the peers' hosts, so that the process may end.
  virtual bool has_delivered() const { return !has_unsent(); }
  /// Copies the unsent payloads from this memory, because its owner takes it back.
  virtual void let_go(const std::byte* begin, const std::byte* end) = 0;
  /// Discards the rest of the payload that is arriving from `peer`.
  virtual void discard(int peer) = 0;
  /// Ends the link to `peer`: no more frames in either direction.
  virtual void close(int peer) = 0;
  /// In a forked process: gives up what it shares with its parent, without sending anything.
  virtual void disown() = 0;
};

}  // namespace pycoll
