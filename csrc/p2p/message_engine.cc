#include "p2p/message_engine.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "reduce/reduce_copy.h"
#include "transport/proxy/proxy.h"

namespace pycoll {
namespace {

// A message up to this size is copied into the mailbox and out of it. For a larger one it is
// cheaper to make the sender wait and to copy once.
constexpr size_t kEagerBytes = 64 << 10;
// Size of a message's parts. Several fit into the mailbox, so that both ranks copy at once. Large
// messages, whose bytes come from memory instead of the caches, have smaller parts.
constexpr size_t part_bytes(size_t nbytes) {
  return nbytes < (size_t{32} << 20) ? 32 << 10 : 16 << 10;
}
// For messages of at least this size the receiver writes around the caches.
constexpr size_t kStreamingBytes = 16 << 20;
// Messages taken in one poll: limits how long a flood from one rank delays the other ranks.
constexpr int kMaxMessagesPerPoll = 64;
constexpr size_t kMaxBufferedBytes = size_t{1} << 30;
// Announced messages of one rank that no receive has taken: limits the memory that a hostile rank
// takes from its peers, to about 200 MB.
constexpr int kMaxAnnounced = 1 << 20;
constexpr uint64_t kMaxMessageBytes = (uint64_t{1} << 48) - 1;  // what a header can hold

// libc's copy: for messages faster than copy_bytes at every size from 4 bytes to 64 MiB.
void copy_message(std::byte* dst, const std::byte* src, size_t nbytes) {
  if (nbytes != 0) std::memcpy(dst, src, nbytes);
}

Unexpected announced(int source, const MessageHeader& header) {
  return {.source = source,
          .tag = header.tag,
          .dtype = static_cast<DType>(header.dtype),
          .dtype_hash = static_cast<uint16_t>(header.dtype_hash),
          .nbytes = header.nbytes,
          .announced = true,
          .blocking = header.blocking != 0,
          .send_id = header.ref.send_id,
          .address = header.ref.address,
          .on_device = header.ref.offset != 0};
}

const std::byte* eager_bytes(const MessageHeader& header) {
  return header.nbytes <= MessageHeader::kInlineBytes ? header.bytes : header.body();
}

}  // namespace

MessageEngine::MessageEngine(Transport& transport, PeerMemory& peer_memory, bool checks_data)
    : segment_(transport.segment()),
      rank_(transport.rank()),
      num_ranks_(transport.num_ranks()),
      peer_memory_(peer_memory),
      device_messages_(transport, peer_memory),
      recorder_(segment_, rank_),
      parts_are_fast_(transport.name() != "local" && !segment_.ranks_share_cores()),
      checks_data_(checks_data),
      outboxes_(static_cast<size_t>(num_ranks_)),
      num_announced_(static_cast<size_t>(num_ranks_)) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    inboxes_.emplace_back(segment_.mailbox(peer, rank_));
    outboxes_[static_cast<size_t>(peer)].writer = MailboxWriter(segment_.mailbox(rank_, peer));
  }
}

void MessageEngine::use_sealed_copy(MessageOp& op) {
  op.sealed.reset(new std::byte[op.nbytes + kChecksumBytes]);
  op.array = op.data;
  op.data = op.sealed.get();
  if (op.is_send) {
    const Checksum sum = Checksum::of(op.array, op.nbytes);
    copy_message(op.data, op.array, op.nbytes);
    std::memcpy(op.data + op.nbytes, &sum, sizeof(sum));
  }
  op.nbytes += kChecksumBytes;
}

bool MessageEngine::unseal(MessageOp* op) {
  const size_t nbytes = op->array_bytes();
  if (is_intact(op->data, nbytes)) {
    copy_message(op->array, op->data, nbytes);
    return true;
  }
  segment_.fail({.code = FailureCode::kCorrupted,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(op->source),
                 .message = Failure::mark_of(op->number)});
  leave_to_fail(op);
  return false;
}

// Sending.

void MessageEngine::post_send(MessageOp* op) {
  if (op->peer == rank_) return send_to_self(op);
  Outbox& out = outboxes_[static_cast<size_t>(op->peer)];
  if (out.controls.empty() && out.queued.empty() && write(out, op)) return;
  op->state = MessageOp::State::kQueued;
  out.queued.push_back(op);
  ++num_backlog_;
}

template <class Message>
bool MessageEngine::fits(MessageOp* op, int source, const Message& message) {
  op->source = source;
  const auto dtype = static_cast<DType>(message.dtype);
  const bool same_type = op->dtype == dtype && op->dtype_hash == message.dtype_hash;
  if (op->nbytes == message.nbytes && same_type) return true;
  const uint64_t sent = message.nbytes;
  const uint64_t checksum = op->nbytes - op->array_bytes();
  segment_.message_mismatch(rank_) = {.source = source,
                                      .tag = op->tag,
                                      .sent_bytes = sent - std::min(sent, checksum),
                                      .expected_bytes = op->array_bytes(),
                                      .sent_dtype = static_cast<uint8_t>(dtype),
                                      .expected_dtype = static_cast<uint8_t>(op->dtype)};
  segment_.fail({.code = FailureCode::kMessageMismatch,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(source)});
  leave_to_fail(op);
  return false;
}

void MessageEngine::leave_to_fail(MessageOp* op) {
  broken_ = true;
  op->state = MessageOp::State::kPosted;
  queue_.post(op);  // stays pending, and ends with all others
}

bool MessageEngine::write(Outbox& out, MessageOp* op) {
  const size_t nbytes = op->nbytes;
  const bool eager = op->offer == nullptr &&
                     nbytes <= std::min(kEagerBytes, out.writer.max_body_bytes()) &&
                     out.writer.has_eager_budget(nbytes);
  const bool is_inline = nbytes <= MessageHeader::kInlineBytes;
  MessageHeader* header = out.writer.reserve(eager && !is_inline ? nbytes : 0);
  if (header == nullptr) return false;
  header->kind = eager ? MessageKind::kEager : MessageKind::kAnnounce;
  header->nbytes = nbytes & kMaxMessageBytes;
  header->dtype_hash = op->dtype_hash;
  header->tag = op->tag;
  header->dtype = static_cast<uint8_t>(op->dtype) & 0x7f;
  header->blocking = op->blocking ? 1 : 0;
  if (eager) {
    copy_message(is_inline ? header->bytes : header->body(), op->data, nbytes);
    out.writer.spend_eager_budget(nbytes);
  } else {
    op->id = next_id_++;
    op->state = MessageOp::State::kAnnounced;
    in_flight_.emplace(op->id, op);
    header->ref = {op->id, 0, reinterpret_cast<uint64_t>(op->data), 0};
    if (op->offer != nullptr) {
      header->ref = {op->id, 0, reinterpret_cast<uint64_t>(op->offer), 1};
    }
  }
  out.writer.commit(header);
  segment_.ring_message_bell(op->peer);
  if (eager) finish(op);
  return true;
}

void MessageEngine::send_to_self(MessageOp* op) {
  if (MessageOp* receive = queue_.match(rank_, op->tag)) {
    receive->source = rank_;
    if (!fits(receive, rank_, *op)) {
      queue_.post(op);  // stays pending, and ends with the mismatch error
      return;
    }
    const int device = std::max(receive->device, op->device);
    if (!move(device, receive->data, op->data, op->nbytes)) {
      leave_to_fail(receive);
      return leave_to_fail(op);
    }
    finish(receive);
  } else {
    Unexpected message{.source = rank_,
                       .tag = op->tag,
                       .dtype = op->dtype,
                       .dtype_hash = op->dtype_hash,
                       .nbytes = op->nbytes};
    message.bytes.reset(new std::byte[op->nbytes]);
    if (!move(op->device, message.bytes.get(), op->data, op->nbytes)) return leave_to_fail(op);
    queue_.add(std::move(message));
  }
  finish(op);
}

bool MessageEngine::write_control(Outbox& out, int peer, const Control& control) {
  MessageHeader* header = out.writer.reserve(0);
  if (header == nullptr) return false;
  header->kind = control.kind;
  header->ref = control.ref;
  out.writer.commit(header);
  segment_.ring_message_bell(peer);
  return true;
}

void MessageEngine::tell(int peer, const Control& control) {
  Outbox& out = outboxes_[static_cast<size_t>(peer)];
  if (out.controls.empty() && write_control(out, peer, control)) return;
  out.controls.push_back(control);
  ++num_controls_;
  ++num_backlog_;
}

void MessageEngine::flush(Outbox& out, int peer) {
  while (!out.controls.empty() && write_control(out, peer, out.controls.front())) {
    out.controls.pop_front();
    --num_controls_;
    --num_backlog_;
  }
  while (!out.queued.empty() && write(out, out.queued.front())) {
    out.queued.pop_front();
    --num_backlog_;
  }
  if (!out.streams.empty()) flush_stream(out, peer);
}

void MessageEngine::flush_stream(Outbox& out, int peer) {
  MessageOp* op = out.streams.front();
  while (op->moved < op->nbytes) {
    const size_t part = std::min(op->nbytes - op->moved, part_bytes(op->nbytes));
    MessageHeader* header = out.writer.reserve(part);
    if (header == nullptr) return;
    header->kind = MessageKind::kPart;
    header->nbytes = part & kMaxMessageBytes;
    header->ref = {op->id, op->recv_id, 0, op->moved};
    if (!move(op->device, header->body(), op->data + op->moved, part)) return;
    out.writer.commit(header);
    segment_.ring_message_bell(peer);
    op->moved += part;
  }
  out.streams.pop_front();
  --num_backlog_;
  in_flight_.erase(op->id);
  finish(op);
}

// Receiving.

void MessageEngine::post_recv(MessageOp* op) {
  Unexpected message;
  if (queue_.take(op->peer, op->tag, num_ranks_, &message)) return accept(op, message);
  op->state = MessageOp::State::kPosted;
  queue_.post(op);
  progress(op->peer);
}

void MessageEngine::progress(int source) {
  if (source == kAnySource) {
    for (int rank = 0; rank < num_ranks_; ++rank) poll(rank);
  } else {
    poll(source);
    poll(next_source_);
    next_source_ = next_source_ + 1 == num_ranks_ ? 0 : next_source_ + 1;
  }
  if (num_backlog_ == 0 || broken_) return;
  for (int peer = 0; peer < num_ranks_; ++peer) flush(outboxes_[static_cast<size_t>(peer)], peer);
}

void MessageEngine::poll(int source) {
  MailboxReader& inbox = inboxes_[static_cast<size_t>(source)];
  // Without pending operations messages stay in the mailbox until a receive takes them from there.
  for (int i = 0; i < kMaxMessagesPerPoll && !broken_ && has_pending(); ++i) {
    const MessageHeader* header = inbox.peek();
    if (header == nullptr) break;
    if (!handle(source, *header)) return reject(source);
    inbox.release(header);
    // The sender may be sleeping until there is room.
    segment_.ring_message_bell(source);
  }
}

/// Breaks the communicator; a rank of another host also loses its link.
void MessageEngine::reject(int source) {
  broken_ = true;
  Proxy* proxy = segment_.proxy();
  if (proxy != nullptr && proxy->is_remote(source)) return proxy->reject(source);
  segment_.fail({.code = FailureCode::kPeerDied,
                 .signal = Transport::kInvalidFrame,
                 .reporter = static_cast<uint16_t>(rank_),
                 .culprit = static_cast<uint16_t>(source)});
}

bool MessageEngine::handle(int source, const MessageHeader& header) {
  switch (header.kind) {
    case MessageKind::kEager:
      return receive_eager(source, header);
    case MessageKind::kAnnounce:
      return receive_announced(source, header);
    case MessageKind::kPart:
      return receive_part(source, header);
    case MessageKind::kTaken:
    case MessageKind::kPull:
      return handle_answer(source, header);
    case MessageKind::kSkip:
      return true;
  }
  return false;
}

bool MessageEngine::handle_answer(int source, const MessageHeader& header) {
  const auto found = in_flight_.find(header.ref.send_id);
  if (found == in_flight_.end()) return false;
  MessageOp* op = found->second;
  // An announced message has one answer, from the rank that it was announced to.
  if (op->peer != source || op->state != MessageOp::State::kAnnounced) return false;
  if (header.kind == MessageKind::kTaken) {
    in_flight_.erase(found);
    finish(op);
    return true;
  }
  op->state = MessageOp::State::kStreaming;
  op->recv_id = header.ref.recv_id;
  outboxes_[static_cast<size_t>(source)].streams.push_back(op);
  ++num_backlog_;
  return true;
}

bool MessageEngine::receive_eager(int source, const MessageHeader& header) {
  MailboxReader& inbox = inboxes_[static_cast<size_t>(source)];
  if (!inbox.count_eager(header.nbytes)) return false;
  if (MessageOp* op = queue_.match(source, header.tag)) {
    if (!fits(op, source, header)) return true;
    if (!deliver(op, 0, eager_bytes(header), header.nbytes)) return true;
    inbox.delivered(header.nbytes);
    finish(op);
    return true;
  }
  Unexpected message{.source = source,
                     .tag = header.tag,
                     .dtype = static_cast<DType>(header.dtype),
                     .dtype_hash = static_cast<uint16_t>(header.dtype_hash),
                     .nbytes = header.nbytes};
  message.counted = true;
  message.bytes.reset(new std::byte[header.nbytes]);
  copy_message(message.bytes.get(), eager_bytes(header), header.nbytes);
  queue_.add(std::move(message));
  return true;
}

bool MessageEngine::receive_announced(int source, const MessageHeader& header) {
  if (MessageOp* op = queue_.match(source, header.tag)) {
    if (fits(op, source, header)) {
      pull(op, source, announced(source, header));
    }
    return true;
  }
  if (num_announced_[static_cast<size_t>(source)] == kMaxAnnounced) return false;
  ++num_announced_[static_cast<size_t>(source)];
  queue_.add(announced(source, header));
  return true;
}

bool MessageEngine::receive_part(int source, const MessageHeader& header) {
  const auto found = arrivals_.find(header.ref.recv_id);
  if (found == arrivals_.end()) return false;
  MessageOp* op = found->second;
  // The parts of a message come in order.
  if (op->source != source || header.ref.offset != op->moved ||
      header.nbytes > op->nbytes - op->moved) {
    return false;
  }
  if (op->nbytes >= kStreamingBytes && op->device < 0) {
    copy_bytes(op->data + op->moved, header.body(), header.nbytes, true);
  } else if (!move(op->device, op->data + op->moved, header.body(), header.nbytes)) {
    return true;  // it stays pending, and ends with all others
  }
  op->moved += header.nbytes;
  if (op->moved < op->nbytes) return true;
  arrivals_.erase(found);
  if (MessageOp* then = op->then) {
    buffered_bytes_ -= op->nbytes;
    if (deliver(then, 0, op->data, op->nbytes)) finish(then);
  }
  finish(op);
  return true;
}

void MessageEngine::accept(MessageOp* op, Unexpected& message) {
  const bool was_announced = message.source != rank_ && !message.counted;
  if (was_announced) --num_announced_[static_cast<size_t>(message.source)];
  if (!fits(op, message.source, message)) return;
  if (message.announced) {
    return pull(op, message.source, message);
  }
  if (message.arriving != nullptr && message.arriving->state != MessageOp::State::kOver) {
    // The buffer must outlive `message`, so the arriving operation now owns it.
    message.arriving->then = op;
    message.arriving->keep_alive = std::shared_ptr<std::byte[]>(std::move(message.bytes));
    op->state = MessageOp::State::kArriving;
    return;
  }
  if (!deliver(op, 0, message.bytes.get(), message.nbytes)) return;
  if (message.counted) {
    inboxes_[static_cast<size_t>(message.source)].delivered(message.nbytes);
  } else if (was_announced) {
    buffered_bytes_ -= message.nbytes;
  }
  finish(op);
}

bool MessageEngine::move(int device, std::byte* dst, const std::byte* src, size_t nbytes) {
  if (device < 0 || nbytes == 0) {
    copy_message(dst, src, nbytes);
    return true;
  }
  try {
    device_messages_.copy(device, dst, src, nbytes);
    return true;
  } catch (const CudaError& error) {
    broken_ = true;
    segment_.revoke(rank_, error.what());
    return false;
  }
}

bool MessageEngine::deliver(MessageOp* op, size_t at, const std::byte* src, size_t nbytes) {
  if (move(op->device, op->data + at, src, nbytes)) return true;
  leave_to_fail(op);
  return false;
}

/// Copies the message from the sender's memory. False if that is not possible.
bool MessageEngine::take(MessageOp* op, int source, const Unexpected& message) {
  if (!message.on_device) {
    return op->device < 0 && peer_memory_.read(source, op->data, message.address, op->nbytes);
  }
  if (op->device < 0) return false;
  const std::byte* const bytes = device_messages_.find(source, message.address, op->device);
  return bytes != nullptr && move(op->device, op->data, bytes, op->nbytes);
}

void MessageEngine::pull(MessageOp* op, int source, const Unexpected& message) {
  bool taken = op->nbytes == 0;
  // Parts through the caches are faster than a copy from the sender's memory, whose pages the
  // kernel must look up one by one. This needs both ranks running, and a sender that only waits for
  // this.
  const bool prefer_parts = message.blocking && parts_are_fast_ && !message.on_device;
  MailboxReader& inbox = inboxes_[static_cast<size_t>(source)];
  if (!taken && !prefer_parts && inbox.begin_taking(segment_.failure_word())) {
    // A sender that has given up meanwhile may have changed what was read.
    taken = take(op, source, message);
    fence_behind_reads();
    taken = taken && load_acquire(segment_.failure_word()) == 0;
    inbox.end_taking();
    if (broken_) return leave_to_fail(op);
  }
  if (taken) {
    tell(source, {MessageKind::kTaken, {message.send_id, 0, 0, 0}});
    return finish(op);
  }
  op->id = next_id_++;
  op->state = MessageOp::State::kArriving;
  arrivals_.emplace(op->id, op);
  tell(source, {MessageKind::kPull, {message.send_id, op->id, 0, 0}});
}

void MessageEngine::buffer_announced(int source) {
  if (queue_.num_held_senders() == 0 || broken_) return;
  queue_.for_each_held([this, source](Unexpected& message) {
    if (source != kAnySource && message.source != source) return;
    if (message.nbytes > kMaxBufferedBytes - buffered_bytes_) return;
    message.bytes.reset(new (std::nothrow) std::byte[message.nbytes]);
    if (message.bytes == nullptr) return;
    buffered_bytes_ += message.nbytes;
    message.announced = false;
    message.arriving = std::make_shared<MessageOp>();
    message.arriving->self = message.arriving;
    message.arriving->blocking = false;
    message.arriving->dtype = message.dtype;
    message.arriving->dtype_hash = message.dtype_hash;
    message.arriving->peer = message.source;
    message.arriving->source = message.source;
    message.arriving->tag = message.tag;
    message.arriving->data = message.bytes.get();
    message.arriving->nbytes = message.nbytes;
    pull(message.arriving.get(), message.source, message);
  });
}

bool MessageEngine::is_being_taken() const {
  return std::any_of(outboxes_.begin(), outboxes_.end(),
                     [](const Outbox& out) { return out.writer.is_being_taken(); });
}

void MessageEngine::finish(MessageOp* op) {
  if (op->sealed != nullptr && !op->is_send && op->error == nullptr && !unseal(op)) return;
  op->state = MessageOp::State::kOver;
  recorder_.end(*op);
  if (op->self != nullptr) {
    finished_.push_back(std::move(op->self));
  } else {
    store_release(op->over, 1);
  }
}

}  // namespace pycoll
