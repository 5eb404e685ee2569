// Progress of one rank's sends and receives: matching, mailboxes, announced messages.
//
// A small message goes through the mailbox (eager). A large one is announced there; the matching
// receive copies it from the sender's own memory and tells the sender (kTaken). If the system does
// not permit that, the receive asks for the bytes in parts through the mailbox (kPull, kPart).
// The engine neither waits nor locks: PointToPoint does both.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "p2p/device_messages.h"
#include "p2p/message_queue.h"
#include "p2p/message_recorder.h"
#include "transport/transport.h"

namespace pycoll {

class MessageEngine {
 public:
  /// `checks_data`: each message has a checksum behind it.
  MessageEngine(Transport& transport, PeerMemory& peer_memory, bool checks_data);

  /// Whether arrays of devices may be sent and received; else only copies of them in CPU memory.
  bool carries_devices() const { return !checks_data_ && segment_.proxy() == nullptr; }
  DeviceMessages& device_messages() { return device_messages_; }

  /// Starts an operation, which may be over on return.
  void post(MessageOp* op) {
    if (checks_data_) [[unlikely]]
      use_sealed_copy(*op);
    recorder_.begin(*op);
    op->is_send ? post_send(op) : post_recv(op);
    recorder_.begun();
  }
  /// Handles messages from `source` and from one other rank; with kAnySource, from all ranks.
  void progress(int source);
  /// True when all control messages, which peers wait for, are in the mailboxes.
  bool has_told_all() const { return num_controls_ == 0; }
  bool has_pending() const {
    return num_backlog_ != 0 || !queue_.posted().empty() || !in_flight_.empty() ||
           !arrivals_.empty();
  }
  /// Copies announced messages of waiting senders into private memory, up to a total size, so that
  /// ranks that all send before they receive do not wait for each other.
  void buffer_announced(int source);
  /// Calls `visit` for every operation that is not over.
  template <class Visit>
  void for_each_pending(Visit&& visit);
  /// Ends every pending operation with the error that `error_of(op)` makes.
  template <class ErrorOf>
  void fail_all(ErrorOf&& error_of);
  /// True while another rank copies from this one's memory.
  bool is_being_taken() const;
  /// Returns the asynchronous operations that have ended since the last call. The caller releases
  /// their arrays, which may need a lock that must not be waited for here, and marks them as over.
  std::vector<std::shared_ptr<MessageOp>> take_finished() { return std::move(finished_); }
  bool has_finished() const { return !finished_.empty(); }

 private:
  struct Control {
    MessageKind kind;
    MessageRef ref;
  };
  struct Outbox {
    MailboxWriter writer;
    std::deque<Control> controls;
    std::deque<MessageOp*> queued;   // sends that are not in the mailbox yet, in order
    std::deque<MessageOp*> streams;  // sends in parts
  };

  static void use_sealed_copy(MessageOp& op);
  /// Fills the array of a receive from its sealed copy; breaks the communicator and returns false
  /// if the checksum differs.
  bool unseal(MessageOp* op);
  /// Leaves an operation, whose failure has broken the communicator, to fail_all().
  void leave_to_fail(MessageOp* op);
  void post_send(MessageOp* op);
  void post_recv(MessageOp* op);
  void send_to_self(MessageOp* op);
  bool write(Outbox& out, MessageOp* op);
  bool write_control(Outbox& out, int peer, const Control& control);
  void tell(int peer, const Control& control);
  void flush(Outbox& out, int peer);
  void flush_stream(Outbox& out, int peer);

  void poll(int source);
  // These return false if the message is invalid. Its lines have been checked where it arrived.
  bool handle(int source, const MessageHeader& header);
  bool handle_answer(int source, const MessageHeader& header);
  bool receive_eager(int source, const MessageHeader& header);
  bool receive_announced(int source, const MessageHeader& header);
  bool receive_part(int source, const MessageHeader& header);
  void reject(int source);
  void accept(MessageOp* op, Unexpected& message);
  /// Whether a message has the receive's size and dtype; otherwise breaks the communicator.
  template <class Message>
  bool fits(MessageOp* op, int source, const Message& message);
  void pull(MessageOp* op, int source, const Unexpected& message);
  bool take(MessageOp* op, int source, const Unexpected& message);
  /// Copies bytes of a message, from or to memory of `device` if that is not negative. On failure
  /// breaks the communicator and returns false.
  bool move(int device, std::byte* dst, const std::byte* src, size_t nbytes);
  /// Copies bytes to the array of a receive. On failure leaves the operation to fail_all().
  bool deliver(MessageOp* op, size_t at, const std::byte* src, size_t nbytes);
  void finish(MessageOp* op);

  Segment& segment_;
  int rank_;
  int num_ranks_;
  PeerMemory& peer_memory_;
  DeviceMessages device_messages_;
  MessageRecorder recorder_;
  bool parts_are_fast_;
  const bool checks_data_;
  std::vector<MailboxReader> inboxes_;
  std::vector<Outbox> outboxes_;
  MessageQueue queue_;
  std::unordered_map<uint64_t, MessageOp*> in_flight_;  // announced or streaming, by id
  std::unordered_map<uint64_t, MessageOp*> arrivals_;   // receives in parts, by id
  std::vector<std::shared_ptr<MessageOp>> finished_;
  uint64_t next_id_ = 1;
  int num_controls_ = 0;
  int num_backlog_ = 0;  // operations and controls in outboxes
  int next_source_ = 0;
  size_t buffered_bytes_ = 0;
  std::vector<int> num_announced_;  // by source: announced messages that no receive has taken
  bool broken_ = false;  // after a mismatch or an invalid message: no operation progresses
};

template <class Visit>
void MessageEngine::for_each_pending(Visit&& visit) {
  for (MessageOp* op : queue_.posted()) visit(*op);
  for (const auto& [id, op] : in_flight_) visit(*op);
  for (const auto& [id, op] : arrivals_) visit(op->then == nullptr ? *op : *op->then);
  for (Outbox& out : outboxes_) {
    for (MessageOp* op : out.queued) visit(*op);
  }
}

template <class ErrorOf>
void MessageEngine::fail_all(ErrorOf&& error_of) {
  broken_ = true;
  std::vector<MessageOp*> pending;
  for_each_pending([&pending](MessageOp& op) { pending.push_back(&op); });
  for (const auto& [id, op] : arrivals_) {
    if (op->then != nullptr) finished_.push_back(std::move(op->self));
  }
  queue_.posted().clear();
  in_flight_.clear();
  arrivals_.clear();
  for (Outbox& out : outboxes_) {
    out.queued.clear();
    out.streams.clear();
    out.controls.clear();
  }
  num_controls_ = num_backlog_ = 0;
  for (MessageOp* op : pending) {
    op->error = error_of(*op);
    finish(op);
  }
}

}  // namespace pycoll
