// A mailbox: the ring of messages from one rank to another, with the flag inside each message.
//
// A message is a header of one cache line and a body of whole lines behind it, so that a small one
// comes with one flight. Invariants:
//   - the writer alone writes lines, and only lines that `head` has passed (a credit);
//   - before a header's flag is released, the flag of the line behind the message is cleared: the
//     reader, who looks there next, never takes an old body for a header;
//   - the reader alone advances `head`, after its last load from the lines that it gives back.
// The memory starts as zeros, which is an empty ring.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/ring/slot.h"

namespace pycoll {

enum class MessageKind : uint8_t {
  kSkip,      // fills the end of the ring: the next header is in line 0
  kEager,     // the bytes are here
  kAnnounce,  // the bytes lie in the sender's memory until it is told kTaken
  kTaken,     // to the sender: the bytes were taken
  kPull,      // to the sender: send the bytes in parts
  kPart,      // some of the bytes of an announced message
};

/// Names the two ends of a message that is announced.
struct MessageRef {
  uint64_t send_id;  // of the send among those of its rank
  uint64_t recv_id;  // of the receive among those of its rank (kPull, kPart)
  uint64_t address;  // of the bytes in the sender's memory (kAnnounce)
  uint64_t offset;   // of this part (kPart)
};

struct alignas(64) MessageHeader {
  static constexpr size_t kInlineBytes = 40;

  uint64_t flag;    // 0: nothing is here yet
  uint64_t nbytes;  // of the message, or of this part of it
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

/// What the reader tells the writer, on lines of its own.
struct alignas(kFlagBytes) MailboxReaderState {
  uint64_t head = 0;             // lines read since the start
  uint64_t delivered_bytes = 0;  // of eager messages that a receive has taken
  uint64_t taking = 0;           // 1 while the reader copies from the writer's own memory
};

struct MailboxMemory {
  MailboxReaderState* reader = nullptr;
  MessageHeader* lines = nullptr;
  uint32_t num_lines = 0;
};

/// How large the mailboxes of a world are, and where each one lies. n squared rings: smaller ones
/// for large worlds. A ring that nobody uses costs no memory.
struct MailboxLayout {
  static size_t total_bytes(int num_ranks);
  static MailboxMemory at(std::byte* base, int num_ranks, int src, int dst);
};

/// The sender's end. Private to the sending rank.
class MailboxWriter {
 public:
  MailboxWriter() = default;
  explicit MailboxWriter(const MailboxMemory& memory) : memory_(memory) {}

  /// The place of a message with so many bytes behind its header; null while the ring is too full.
  /// `body_bytes` is at most max_body_bytes(). Without commit() nothing has happened.
  MessageHeader* reserve(size_t body_bytes);
  /// Makes the reserved message visible: pairs with MailboxReader::peek.
  void commit(MessageHeader* header);
  size_t max_body_bytes() const { return memory_.num_lines / 4 * sizeof(MessageHeader); }

  /// Eager messages that no receive has taken yet count up to a budget, so that a receiver's queue
  /// is bounded by it.
  bool has_eager_budget(size_t nbytes);
  void spend_eager_budget(size_t nbytes) { sent_bytes_ += eager_cost(nbytes); }
  /// True while the reader copies from this rank's memory.
  bool is_being_taken() const { return load_acquire(memory_.reader->taking) != 0; }

  static size_t eager_cost(size_t nbytes) { return nbytes + 128; }

 private:
  static constexpr uint64_t kEagerBudgetBytes = 1 << 20;

  MailboxMemory memory_;
  uint64_t written_ = 0;  // lines since the start
  uint64_t head_ = 0;     // when last looked at
  uint64_t sent_bytes_ = 0;
  uint64_t delivered_bytes_ = 0;  // when last looked at
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
  /// Gives the message's lines back: pairs with MailboxWriter::reserve.
  void release(const MessageHeader* header) {
    read_ += header->num_lines;
    store_release(memory_.reader->head, read_);
  }
  /// A receive has taken an eager message of this size.
  void delivered(size_t nbytes) {
    delivered_bytes_ += MailboxWriter::eager_cost(nbytes);
    store_release(memory_.reader->delivered_bytes, delivered_bytes_);
  }

  /// Around a copy from the writer's memory. False: the communicator is broken, whose failure word
  /// this is, and the memory may be gone.
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
  uint64_t delivered_bytes_ = 0;
};

}  // namespace pycoll
