#include "transport/ring/mailbox.h"

#include "base/pages.h"
#include "transport/ring/record_limits.h"

namespace pycoll {
namespace {

uint32_t num_lines(int num_ranks) { return num_ranks <= 16 ? 4096 : 1024; }

// The lines start on a new page, which they do not share with the reader's state: a mailbox uses
// one page for that state, and otherwise only pages that messages have touched.
size_t mailbox_bytes(int num_ranks) {
  return kPage + static_cast<size_t>(num_lines(num_ranks)) * sizeof(MessageHeader);
}

}  // namespace

bool is_valid(const MessageHeader& message, uint64_t num_lines, uint64_t lines_to_end) {
  if (message.kind == MessageKind::kSkip) {
    return num_lines == 1 && message.num_lines == lines_to_end;
  }
  if (message.num_lines != num_lines) return false;
  const uint64_t body_bytes = (num_lines - 1) * sizeof(MessageHeader);
  const bool fills_body = message.nbytes != 0 && message.nbytes <= body_bytes &&
                          body_bytes - message.nbytes < sizeof(MessageHeader);
  switch (message.kind) {
    case MessageKind::kEager:
      return message.dtype < kNumRecordedDTypes &&
             (message.nbytes <= MessageHeader::kInlineBytes ? num_lines == 1 : fills_body);
    case MessageKind::kAnnounce:
      return message.dtype < kNumRecordedDTypes && num_lines == 1;
    case MessageKind::kTaken:
    case MessageKind::kPull:
      return num_lines == 1;
    case MessageKind::kPart:
      return fills_body;
    default:
      return false;
  }
}

size_t MailboxLayout::total_bytes(int num_ranks) {
  return static_cast<size_t>(num_ranks) * static_cast<size_t>(num_ranks) * mailbox_bytes(num_ranks);
}

MailboxMemory MailboxLayout::at(std::byte* base, int num_ranks, int src, int dst) {
  const size_t index =
      static_cast<size_t>(src) * static_cast<size_t>(num_ranks) + static_cast<size_t>(dst);
  std::byte* mailbox = base + index * mailbox_bytes(num_ranks);
  return {reinterpret_cast<MailboxReaderState*>(mailbox),
          reinterpret_cast<MessageHeader*>(mailbox + kPage), num_lines(num_ranks)};
}

MessageHeader* MailboxWriter::reserve(size_t body_bytes) {
  const uint64_t total = memory_.num_lines;
  const uint64_t wanted = 1 + (body_bytes + sizeof(MessageHeader) - 1) / sizeof(MessageHeader);
  const uint64_t at = written_ & (total - 1);
  const uint64_t skipped = at + wanted > total ? total - at : 0;
  // One line more than the message, because the flag of the line behind it is cleared too.
  const uint64_t end = written_ + skipped + wanted + 1;
  if (end - head_ > total) {
    head_ = load_acquire(memory_.reader->head);
    if (end - head_ > total) return nullptr;
  }
  if (skipped != 0) {
    MessageHeader* skip = &memory_.lines[at];
    skip->kind = MessageKind::kSkip;
    skip->num_lines = static_cast<uint16_t>(skipped);
    commit(skip);
  }
  MessageHeader* header = &memory_.lines[written_ & (total - 1)];
  header->num_lines = static_cast<uint16_t>(wanted);
  return header;
}

void MailboxWriter::commit(MessageHeader* header) {
  written_ += header->num_lines;
  store_relaxed(memory_.lines[written_ & (memory_.num_lines - 1)].flag, 0);
  store_release(header->flag, written_);
}

bool MailboxWriter::has_eager_budget(size_t nbytes) {
  const uint64_t end = sent_bytes_ + eager_cost(nbytes);
  if (end - delivered_bytes_ <= kEagerBudgetBytes) return true;
  delivered_bytes_ = load_acquire(memory_.reader->delivered_bytes);
  return end - delivered_bytes_ <= kEagerBudgetBytes;
}

const MessageHeader* MailboxReader::peek_behind(const MessageHeader* skip) {
  release(skip);
  const MessageHeader* header = &memory_.lines[read_ & (memory_.num_lines - 1)];
  return load_acquire(header->flag) == 0 ? nullptr : header;
}

}  // namespace pycoll
