// A rank of another host, played by a test: it keeps count of what it has sent and received, so it
// can send frames that are valid, and knows what it changes when it sends others.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "frame_world.h"
#include "transport/proxy/state_snapshot.h"

namespace pycoll {

/// A frame that has not been sent yet.
struct Frame {
  FrameHeader header;
  std::string payload;

  std::string bytes() const {
    std::string all(reinterpret_cast<const char*>(&header), sizeof(header));
    return all + payload;
  }
};

class FrameSender {
 public:
  FrameSender(FrameWorld& world, int rank) : world_(world), rank_(rank) {}

  int rank() const { return rank_; }

  Frame frame(FrameKind kind, std::string payload = "") {
    Frame frame;
    frame.header.kind = kind;
    frame.header.group = kGroup;
    frame.header.nbytes = static_cast<uint32_t>(payload.size());
    for (int i = 0; i < kNumSlotProtocols; ++i) frame.header.heads[i] = slots_in_[i];
    frame.payload = std::move(payload);
    return frame;
  }

  Frame slot(ProtocolKind protocol, size_t nbytes) {
    Frame made = frame(FrameKind::kSlot, std::string(nbytes, 's'));
    made.header.protocol = static_cast<uint8_t>(protocol);
    made.header.sequence = slots_out_[static_cast<int>(protocol)] + 1;
    made.header.mark = 1;
    return made;
  }
  Frame mail() {
    Frame made = frame(FrameKind::kMail);
    made.header.word = lines_in_;
    made.header.more = eager_in_;
    return made;
  }
  Frame lines(const MessageHeader& message, const std::string& body = "") {
    std::string payload(reinterpret_cast<const char*>(&message), sizeof(message));
    payload += body;
    payload.resize(sizeof(message) + (body.size() + 63) / 64 * 64);
    Frame made = frame(FrameKind::kLines, std::move(payload));
    made.header.word = lines_out_;
    return made;
  }
  static MessageHeader message(MessageKind kind, uint64_t nbytes, int32_t tag, size_t body = 0) {
    MessageHeader header = {};
    header.nbytes = nbytes;
    header.tag = tag;
    header.num_lines = static_cast<uint16_t>(1 + (body + 63) / 64);
    header.kind = kind;
    header.dtype = static_cast<uint8_t>(DType::kU8) & 0x7f;
    header.blocking = 1;
    return header;
  }
  Frame eager(size_t nbytes, int32_t tag) {
    const bool is_inline = nbytes <= MessageHeader::kInlineBytes;
    const size_t body = is_inline ? 0 : nbytes;
    return lines(message(MessageKind::kEager, nbytes, tag, body), std::string(body, 'e'));
  }
  Frame announce(size_t nbytes, int32_t tag) {
    MessageHeader header = message(MessageKind::kAnnounce, nbytes, tag);
    header.ref = {++last_send_, 0, 0, 0};
    announced_[last_send_] = nbytes;
    return lines(header);
  }
  Frame answer(MessageKind kind, uint64_t send_id) {
    MessageHeader header = message(kind, 0, 0);
    header.ref = {send_id, 77, 0, 0};
    return lines(header);
  }
  Frame part(uint64_t send_id, uint64_t recv_id, uint64_t offset, size_t nbytes) {
    MessageHeader header = message(MessageKind::kPart, nbytes, 0, nbytes);
    header.ref = {send_id, recv_id, 0, offset};
    return lines(header, std::string(nbytes, 'p'));
  }
  /// A skip to the end of the ring.
  Frame skip() {
    MessageHeader header = message(MessageKind::kSkip, 0, 0);
    header.num_lines = static_cast<uint16_t>(lines_to_end());
    return lines(header);
  }
  uint64_t lines_out() const { return lines_out_; }
  uint64_t lines_to_end() const {
    const uint64_t total = world_.segment().mailbox(rank_, 0).num_lines;
    return total - lines_out_ % total;
  }
  /// Whether the ring has room for so many lines and the flag behind them.
  bool has_room(uint64_t num_lines) const {
    const MailboxMemory mail = world_.segment().mailbox(rank_, 0);
    return lines_out_ + num_lines + 1 - load_acquire(mail.reader->head) <= mail.num_lines;
  }
  /// A state of this rank, as its own segment would give it.
  Frame state(FrameKind kind, uint64_t sequence = 1) {
    WireWriter bytes;
    bytes.number(sequence);
    write_state(world_.segment(), rank_, {&sequence, 1}, bytes);
    return frame(kind, bytes.bytes());
  }
  /// A failure that this rank reports; its records are those that rank 0 has of it.
  Frame failure(FailureCode code) {
    const uint64_t word =
        Failure{.code = code, .reporter = static_cast<uint16_t>(rank_), .culprit = 3}.pack();
    WireWriter bytes;
    const uint64_t sequence = 1;
    bytes.number(word);
    write_state(world_.segment(), rank_, {&sequence, 1}, bytes);
    write_state(world_.segment(), 3, {&sequence, 1}, bytes);
    const MessageMismatch mismatch;
    const MessageRecord record;
    bytes.text({reinterpret_cast<const char*>(&mismatch), sizeof(mismatch)});
    bytes.text({reinterpret_cast<const char*>(&record), sizeof(record)});
    bytes.number(uint32_t{0});
    return frame(FrameKind::kFailure, bytes.bytes());
  }

  /// Sends a frame, and counts it as a receiver that accepts it does.
  void send(const Frame& frame) {
    world_.deliver(rank_, frame.bytes());
    count(frame);
    receive();
  }
  void count(const Frame& frame) {
    if (frame.header.kind == FrameKind::kSlot && frame.header.protocol < kNumSlotProtocols) {
      ++slots_out_[frame.header.protocol];
    }
    if (frame.header.kind == FrameKind::kLines && frame.payload.size() >= sizeof(MessageHeader)) {
      MessageHeader header;
      std::memcpy(&header, frame.payload.data(), sizeof(header));
      lines_out_ += header.num_lines;
    }
  }
  /// Takes what rank 0 has sent to this rank.
  void receive() {
    input_ += world_.network().received(rank_);
    size_t at = 0;
    FrameHeader header;
    while (input_.size() - at >= sizeof(header)) {
      std::memcpy(&header, input_.data() + at, sizeof(header));
      if (input_.size() - at - sizeof(header) < header.nbytes) break;
      take(header, input_.data() + at + sizeof(header));
      at += sizeof(header) + header.nbytes;
    }
    input_.erase(0, at);
  }

  /// A send of this rank whose bytes rank 0 wants in parts.
  struct Pull {
    uint64_t send_id;
    uint64_t recv_id;
    uint64_t nbytes;
    uint64_t moved;
  };
  int num_tells = 0;
  std::vector<Pull> pulls;
  std::vector<uint64_t> sends_to_me;  // ids of what rank 0 has announced, oldest first

 private:
  void take(const FrameHeader& header, const char* payload) {
    if (header.kind == FrameKind::kSlot) ++slots_in_[header.protocol];
    if (header.kind == FrameKind::kTell) ++num_tells;
    if (header.kind != FrameKind::kLines) return;
    MessageHeader message;
    std::memcpy(&message, payload, sizeof(message));
    lines_in_ += message.num_lines;
    if (message.kind == MessageKind::kEager) {
      eager_in_ += MailboxWriter::eager_cost(message.nbytes);
    }
    if (message.kind == MessageKind::kAnnounce) sends_to_me.push_back(message.ref.send_id);
    if (message.kind == MessageKind::kPull) {
      const uint64_t id = message.ref.send_id;
      pulls.push_back({id, message.ref.recv_id, announced_[id], 0});
    }
  }

  FrameWorld& world_;
  int rank_;
  std::string input_;
  uint32_t slots_out_[kNumSlotProtocols] = {};
  uint32_t slots_in_[kNumSlotProtocols] = {};
  uint64_t lines_out_ = 0;
  uint64_t lines_in_ = 0;
  uint64_t eager_in_ = 0;
  uint64_t last_send_ = 0;
  std::map<uint64_t, uint64_t> announced_;  // sizes by id
};

}  // namespace pycoll
