// A mailbox: the ring of messages from one rank to another, with the flag inside each message.
//
// A message is a header of one cache line, followed by a body of whole lines, so that a small
// message needs one cache-line transfer. Invariants:
//   - only the writer writes lines, and only lines that `head` has passed (a credit);
//   - before a header's flag is released, the flag of the line behind the message is cleared: the
//     reader, which reads that line next, never mistakes an old body for a header;
//   - only the reader advances `head`, after its last load from the lines that it returns.
// The memory starts as zeros, which is an empty ring.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

enum class MessageKind : uint8_t {
  kSkip,      // fills the end of the ring; the next header is in line 0
  kEager,     // the message contains the bytes
  kAnnounce,  // the bytes stay in the sender's memory until kTaken
  kTaken,     // to the sender: the receiver has the bytes
  kPull,      // to the sender: send the bytes in parts
  kPart,      // some of the bytes of an announced message
};

/// Identifies the two ends of an announced message.
struct MessageRef {
  uint64_t send_id;  // number of the send on its rank
  uint64_t recv_id;  // number of the receive on its rank (kPull, kPart)
  uint64_t address;  // of the bytes in the sender's memory (kAnnounce)
  uint64_t offset;   // of this part (kPart); 1: the address is of a DeviceOffer (kAnnounce)
};

struct alignas(64) MessageHeader {
  static constexpr size_t kInlineBytes = 40;

  uint64_t flag;             // 0: no message yet
  uint64_t nbytes : 48;      // of the message, or of this part of it
  uint64_t dtype_hash : 16;  // MessageOp::dtype_hash
  int32_t tag;
  uint16_t num_lines;  // header and body
  MessageKind kind;
  uint8_t dtype : 7;
  uint8_t blocking : 1;  // the sender waits until the bytes are taken
  union {
    std::byte bytes[kInlineBytes];  // kEager, when they fit
    MessageRef ref;
  };

  std::byte* body() { return reinterpret_cast<std::byte*>(this + 1); }
  const std::byte* body() const { return reinterpret_cast<const std::byte*>(this + 1); }
};
static_assert(sizeof(MessageHeader) == 64);

/// Whether a message of another host may be put into a mailbox: `num_lines` of it have arrived, and
/// the ring has `lines_to_end` from its first line on. A body is then within the lines, and no
/// longer than they need. Fields that the kind does not use may have any value.
bool is_valid(const MessageHeader& message, uint64_t num_lines, uint64_t lines_to_end);

/// The reader's state, for the writer, on separate cache lines.
struct alignas(kFlagBytes) MailboxReaderState {
  uint64_t head = 0;             // lines read since the start
  uint64_t delivered_bytes = 0;  // size of the eager messages that receives have taken
  uint64_t taking = 0;           // 1 while the reader copies from the writer's memory
};

struct MailboxMemory {
  MailboxReaderState* reader = nullptr;
  MessageHeader* lines = nullptr;
  uint32_t num_lines = 0;
};

/// Sizes and places of the mailboxes of a world. There are n squared, so large worlds have smaller
/// ones. An unused ring uses no physical memory.
struct MailboxLayout {
  static size_t total_bytes(int num_ranks);
  static MailboxMemory at(std::byte* base, int num_ranks, int src, int dst);
};

/// The sender's end. Private to the sending rank.
class MailboxWriter {
 public:
  MailboxWriter() = default;
  explicit MailboxWriter(const MailboxMemory& memory) : memory_(memory) {}

  /// Returns the place for a message with `body_bytes`, at most max_body_bytes(), behind its
  /// header; null while the ring is too full. Has no effect without commit().
  MessageHeader* reserve(size_t body_bytes);
  /// Makes the reserved message visible: pairs with MailboxReader::peek.
  void commit(MessageHeader* header);
  size_t max_body_bytes() const { return memory_.num_lines / 4 * sizeof(MessageHeader); }

  /// Whether the budget for eager messages that no receive has taken yet has room for `nbytes`. The
  /// budget bounds the receiver's queue.
  bool has_eager_budget(size_t nbytes);
  void spend_eager_budget(size_t nbytes) { sent_bytes_ += eager_cost(nbytes); }
  /// Whether the reader is copying from this rank's memory.
  bool is_being_taken() const { return load_acquire(memory_.reader->taking) != 0; }

  static size_t eager_cost(size_t nbytes) { return nbytes + 128; }
  static constexpr uint64_t kEagerBudgetBytes = 1 << 20;

 private:
  MailboxMemory memory_;
  uint64_t written_ = 0;  // lines since the start
  uint64_t head_ = 0;     // at the last check
  uint64_t sent_bytes_ = 0;
  uint64_t delivered_bytes_ = 0;  // at the last check
};

/// The receiver's end. Private to the receiving rank.
class MailboxReader {
 public:
  MailboxReader() = default;
  explicit MailboxReader(const MailboxMemory& memory) : memory_(memory) {}

  /// The oldest message, or null. Pairs with MailboxWriter::commit.
  const MessageHeader* peek() {
    const MessageHeader* header = &memory_.lines[read_ & (memory_.num_lines - 1)];
    if (load_acquire(header->flag) == 0) return nullptr;
    return header->kind == MessageKind::kSkip ? peek_behind(header) : header;
  }
  /// Returns the message's lines to the writer: pairs with MailboxWriter::reserve.
  void release(const MessageHeader* header) {
    read_ += header->num_lines;
    store_release(memory_.reader->head, read_);
  }
  /// Counts an eager message. False if the writer has exceeded its budget.
  bool count_eager(size_t nbytes) {
    eager_bytes_ += MailboxWriter::eager_cost(nbytes);
    return eager_bytes_ - delivered_bytes_ <= MailboxWriter::kEagerBudgetBytes;
  }
  /// Reports that a receive has taken an eager message of this size.
  void delivered(size_t nbytes) {
    delivered_bytes_ += MailboxWriter::eager_cost(nbytes);
    store_release(memory_.reader->delivered_bytes, delivered_bytes_);
  }

  /// Call before a copy from the writer's memory, and end_taking() after it. False if the failure
  /// word shows that the communicator is broken: the memory may be gone.
  bool begin_taking(const uint64_t& failure_word) {
    store_then_fence(memory_.reader->taking, 1);
    if (load_acquire(failure_word) == 0) return true;
    end_taking();
    return false;
  }
  void end_taking() { store_release(memory_.reader->taking, 0); }

 private:
  const MessageHeader* peek_behind(const MessageHeader* skip);

  MailboxMemory memory_;
  uint64_t read_ = 0;
  uint64_t eager_bytes_ = 0;
  uint64_t delivered_bytes_ = 0;
};

}  // namespace pycoll
